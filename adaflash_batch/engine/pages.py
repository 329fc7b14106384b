"""Which page of KV memory belongs to whom. Counts only; the memory itself is the target's."""

from __future__ import annotations

import heapq


class OutOfPages(Exception):
    """There are not enough free pages; nothing was taken."""


class PagePool:
    """Reference-counted pages 0..num_pages-1.

    The lowest free page is handed out first, so memory that was never needed is never touched.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._owners = [0] * num_pages

    @property
    def num_pages(self) -> int:
        """All pages."""
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out pages with one owner each.

        Raises:
            OutOfPages: fewer than `count` are free.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Add an owner to pages that are held already."""
        assert all(self._owners[page] > 0 for page in pages), "a free page cannot be shared"
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Take one owner off each page; pages without owners become free."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} was released twice"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                heapq.heappush(self._free, page)

    def owners(self, page: int) -> int:
        """How many hold the page."""
        return self._owners[page]
