"""Whole pages of prompts that were computed before, for requests that begin with the same tokens.

What a page holds depends on the tokens up to its end and on nothing else: positions are absolute,
and the model stays. So a page is known by a name made of all these tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from adaflash_batch.engine.pages import PagePool
from adaflash_batch.kernels.page_size import PAGE

# Of a name: two prompts with the same one are not to be found.
_BYTES = 32


def page_keys(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """A name for each whole page of a prompt, of all tokens up to the page's end."""
    chain, keys = blake2b(digest_size=_BYTES), []
    for end in range(PAGE, len(token_ids) + 1, PAGE):
        chain.update(array("q", token_ids[end - PAGE : end]).tobytes())
        keys.append(chain.digest())
    return tuple(keys)


class PrefixCache:
    """The pages of a pool: handed out, shared by name, kept after their last request.

    It owns what it keeps, beside the requests that use it. Kept pages that nobody else owns are
    idle; the longest unused of them are given up as soon as somebody needs room.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # longest unused first

    @property
    def num_kept(self) -> int:
        """Pages that have a name."""
        return len(self._pages)

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out: free or idle."""
        return self._pool.num_free + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Hand out pages with one owner each, none of which has a name.

        Raises:
            OutOfPages: fewer than `count` are available.
        """
        while self._pool.num_free < count and self._idle:
            self._give_up(next(iter(self._idle)))
        return self._pool.take(count)

    def release(self, pages: Sequence[int]) -> None:
        """Take one owner off each of a request's pages, which are in the order of its text."""
        self._pool.release(list(pages))
        # The last ones first: a page is found only behind those before it.
        for page in reversed(pages):
            if page in self._keys and self._pool.owners(page) == 1:
                self._idle[page] = None

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of these names, up to the first that is not kept."""
        pages = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these are idle."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: list[int]) -> None:
        """Add an owner to pages that were found."""
        self._pool.share(pages)
        for page in pages:
            self._idle.pop(page, None)

    def put(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Keep a request's pages, whole by now, unless there are others of the same names."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._pages:
                self._pool.share([page])
                self._pages[key], self._keys[page] = page, key

    def clear(self) -> None:
        """Keep nothing of what is there; requests keep what they use."""
        for page in list(self._keys):
            self._give_up(page)

    def _give_up(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        self._idle.pop(page, None)
        self._pool.release([page])
