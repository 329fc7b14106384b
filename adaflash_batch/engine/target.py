"""The target model: any transformers decoder, run over packed tokens with paged attention.

# T packed tokens, R chosen rows, H hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from adaflash_batch.engine.attention_call import AttentionCall, CannotAttend, LayerShape
from adaflash_batch.engine.fusing import fuse
from adaflash_batch.engine.packed_linear import PackedLinear, some_outputs
from adaflash_batch.engine.probing import (
    PROBE_TOKENS,
    decoder_layers,
    load_model,
    native_logits,
    probe_ids,
    probe_shapes,
    refuse_encoder,
)
from adaflash_batch.engine.row_linear import RowLinear, make_rows_independent
from adaflash_batch.engine.stack import StackedModel
from adaflash_batch.engine.upload import Upload, upload_to
from adaflash_batch.errors import ConfigError
from adaflash_batch.kernels.attention_kernels import (
    NATIVE,
    AttentionKernels,
    KernelKind,
    attention_kernels,
)
from adaflash_batch.kernels.device_step import DeviceStep, on_device
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.kernels.paged_attention import (
    Attention,
    KVLayer,
    PackedStep,
    unavailable_reason,
)

# Not "adaflash…": transformers takes any name with "flash" in it for a flash-attention build.
ATTENTION_NAME = "packed_paged"
_UNHANDLED_KWARGS = ("s_aux", "sinks", "head_mask", "position_bias", "block_mask")


def _attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, T, D]
    key: torch.Tensor,  # [1, kv heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    adaflash_call: AttentionCall,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' AttentionInterface dispatches to."""
    for name in _UNHANDLED_KWARGS:
        if others.get(name) is not None:
            raise CannotAttend(f"its attention needs `{name}`")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if adaflash_call.kv is None:
        if key.shape[-1] != value.shape[-1]:
            raise CannotAttend("its keys and values have different sizes")
        adaflash_call.record(layer, LayerShape(key.shape[1], key.shape[3]))
        return query.transpose(1, 2), None
    assert adaflash_call.step is not None
    how = Attention(
        scale=scaling if scaling is not None else float(query.shape[-1]) ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = adaflash_call.attend(adaflash_call.step, adaflash_call.kv[layer], q, k, v, how)
    return out.view(1, q.shape[0], q.shape[1], q.shape[2]), None


# What a model of an unknown kind may raise when it is run in a way that it was not made for.
_PROBE_ERRORS = (
    *(CannotAttend, RuntimeError, ValueError, TypeError),
    *(KeyError, IndexError, AttributeError, NotImplementedError),
)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


class Seen(NamedTuple):
    """What a forward left for `tapped` and `head_input`."""

    taps: dict[int, torch.Tensor]
    head_input: torch.Tensor | None


class Target:
    """A loaded causal language model.

    Attributes:
        name: what the user called it.
        vocab_size: rows of the output layer.
        hidden_size: H.
        num_layers: decoder layers.
        context: most positions that the model was made for.
        dtype: of weights, activations and KV memory.
        kernels: that attend.
        upload: takes an array to the device without waiting for it.
    """

    def __init__(self, model: Any, name: str, kernels: AttentionKernels = NATIVE) -> None:
        config: Any = model.config.get_text_config()
        self.name = name
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.context = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
        self._model: Any = model
        self.device: torch.device = self._model.device
        self.dtype: torch.dtype = self._model.dtype
        self.kernels = kernels
        self.upload: Upload = upload_to(self.device)
        self._taps: dict[int, torch.Tensor] = {}
        self._tapped: set[int] = set()
        self._head_input: torch.Tensor | None = None
        self._head_is_tapped = False
        self.num_forward_tokens = 0
        self._shapes = probe_shapes(self._model, self.num_layers)
        self._stacked = StackedModel.of(model) if kernels.kind == "native" else None
        self._least_tokens = max((each.least_rows for each in self.packed_linears()), default=1)

    @staticmethod
    def load(
        folder: Path,
        name: str,
        *,
        dtype: torch.dtype | None,
        trust_remote_code: bool = False,
        device: torch.device | None = None,
        deterministic: bool = False,
    ) -> Target:
        """Load safetensors from a folder; `dtype` None takes the checkpoint's own.

        Args:
            device: where it runs; None is the CPU.
            deterministic: see `of`.

        Raises:
            ConfigError: the model cannot run here; the message has its name and the reason.
        """
        model = load_model(folder, name, dtype, trust_remote_code)
        placed = model if device is None else model.to(device)
        return Target.of(placed, name, deterministic=deterministic)

    @staticmethod
    def of(
        model: Any, name: str, kernels: KernelKind = "auto", *, deterministic: bool = False
    ) -> Target:
        """Take a transformers model that is in memory; it is changed to paged attention.

        Args:
            kernels: that attend; `auto` takes the fastest.
            deterministic: with Triton's kernels, whether a token's numbers never depend on the
                other tokens of its pass; else a library's matrix product may round them otherwise.

        Raises:
            ConfigError: as `load`.
        """
        _register()
        model.eval().requires_grad_(False)
        try:
            refuse_encoder(model)
            expected = native_logits(model)
            model.set_attn_implementation(ATTENTION_NAME)
            forms = attention_kernels(kernels, model.device)
            fuse(model, forms.kind)
            if deterministic and forms.kind == "triton":
                make_rows_independent(model, model.config.get_text_config().num_hidden_layers)
            target = Target(model, name, forms)
            target._check(expected)
        except _PROBE_ERRORS as error:
            raise ConfigError(
                f"{name} ({type(model).__name__}) cannot run: {error}",
                "Use a decoder-only model whose every layer attends through transformers' "
                "AttentionInterface",
            ) from error
        return target

    @property
    def text_config(self) -> Any:
        """transformers' config of the text model."""
        return self._model.config.get_text_config()

    @property
    def bytes_per_token(self) -> int:
        """KV memory that one token takes."""
        elements = sum(2 * shape.num_kv_heads * shape.head_dim for shape in self._shapes)
        return elements * self.dtype.itemsize

    def new_kv(self, num_pages: int) -> list[KVLayer]:
        """KV memory for every layer; the system hands it over only as it is written.

        A page more than asked for is behind the others, for tokens that only fill up a pass.
        """
        return [
            KVLayer.empty(
                num_pages + 1, shape.num_kv_heads, shape.head_dim, self.dtype, self.device
            )
            for shape in self._shapes
        ]

    def attention_note(self) -> str | None:
        """Why the slow reference attention runs; None when a fast one does."""
        if self.kernels.kind != "native":
            return None if self.kernels.kind == "triton" else "Triton is not installed"
        sizes = {shape.head_dim for shape in self._shapes}
        reasons = (unavailable_reason(self.dtype, size) for size in sizes)
        return next((reason for reason in reasons if reason is not None), None)

    def packed_linears(self) -> list[PackedLinear]:
        """The matrix products of a forward pass, one a module, where they are packed."""
        return [m for m in self._model.modules() if isinstance(m, PackedLinear)]

    def product_kinds(self) -> list[str]:
        """What computes matrix products in a form of ours, in words that tell forms apart."""
        ours = (PackedLinear, RowLinear)
        return sorted({m.kind for m in self._model.modules() if isinstance(m, ours)})

    @property
    def layer_seconds(self) -> dict[str, float]:
        """That all forwards spent within the layers, by part; empty where that is not known."""
        return {} if self._stacked is None else self._stacked.seconds

    @property
    def num_watched(self) -> int:
        """Places whose states are kept; a graph made before one was added does not keep it."""
        return len(self._tapped) + self._head_is_tapped

    def tap(self, layer_ids: tuple[int, ...]) -> None:
        """Keep the output of these decoder layers at every forward, for `tapped`."""
        layers = decoder_layers(self._model, self.num_layers)
        is_hooked = self._stacked is None
        for layer_id in (set(layer_ids) - self._tapped) if is_hooked else ():
            layers[layer_id].register_forward_hook(self._tap_hook(layer_id))
        self._tapped.update(layer_ids)

    def _tap_hook(self, layer_id: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._taps[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def tapped(self, layer_ids: tuple[int, ...], rows: torch.Tensor | slice) -> torch.Tensor:
        """What the last forward left at these layers: [rows, len(layer_ids) * H]."""
        if self._stacked is not None:
            return self._stacked.tapped(layer_ids, rows)
        states = [self._taps[layer_id].view(-1, self.hidden_size) for layer_id in layer_ids]
        return torch.cat([state[rows] for state in states], dim=-1)

    def tap_head(self) -> None:
        """Keep what the output layer is given, for `head_input`."""
        if not self._head_is_tapped:
            self._model.get_output_embeddings().register_forward_pre_hook(self._keep_head_input)
        self._head_is_tapped = True

    def _keep_head_input(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._head_input = inputs[0]

    def head_input(self) -> torch.Tensor:
        """The last hidden states [R, H] behind the logits of the last forward."""
        assert self._head_input is not None
        return self._head_input.view(-1, self.hidden_size)

    def seen(self) -> Seen:
        """What the last forward left, to be shown again."""
        return Seen(dict(self._taps), self._head_input)

    def show(self, seen: Seen) -> None:
        """Let `tapped` and `head_input` give this: its tensors have been written anew."""
        # A copy: the next forward writes to the dict.
        self._taps, self._head_input = dict(seen.taps), seen.head_input

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PackedStep,
        kv: list[KVLayer],
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """One packed forward of what the host knows; see `run`.

        Args:
            token_ids: int64 [T], on the CPU or the device, as are positions and rows.
            step: how the tokens belong to requests; segments one behind the other.
        """
        num_tokens = token_ids.shape[0]
        self.num_forward_tokens += num_tokens
        if num_tokens < self._least_tokens:
            missing = self._least_tokens - num_tokens
            token_ids, positions = (F.pad(each, (0, missing)) for each in (token_ids, positions))
            step = step.filled(num_tokens, missing, len(kv[0].k_pages) - 1)
        if not self.kernels.takes_device_step:
            return self.run(token_ids, positions, step, kv, rows)
        ids, places, chosen = (each.to(self.device) for each in (token_ids, positions, rows))
        return self.run(ids, places, on_device(step, self.upload), kv, chosen)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PackedStep | DeviceStep,
        kv: list[KVLayer],
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """One packed forward. Reads nothing back from the device, so a graph can hold it.

        Args:
            token_ids: int64 [T].
            positions: int64 [T].
            step: how the tokens belong to requests; of the kind that the kernels take.
            kv: KV memory, read and written.
            rows: int64 [R], the tokens whose successor is to be chosen.

        Returns:
            Logits [R, V] in the model's dtype.
        """
        if self._stacked is not None:
            assert isinstance(step, PackedStep)
            return self._stacked.forward(token_ids, positions, step, kv, rows, self._tapped)
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            adaflash_call=AttentionCall(
                step, kv, self.kernels.attend, self.kernels.rotate_and_attend
            ),
        )
        chosen: torch.Tensor = output.logits[0]
        return chosen

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of any shape of token ids, with the model's own scaling."""
        embeddings: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        return embeddings

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output layer: [.., H] to [.., V], without the model's final soft cap."""
        kept = self._head_input  # of the last forward, whatever is computed since
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        self._head_input = kept
        return logits

    def head_of(self, token_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """`head` for these tokens alone: [.., H] to [.., len(token_ids)].

        It costs as little where the output layer is a linear one. Another kind is computed whole.
        """
        rows = token_ids.to(self.device)
        some = some_outputs(self._model.get_output_embeddings(), rows)
        return some if some is not None else lambda hidden: self.head(hidden)[..., rows]

    def _check(self, expected: torch.Tensor) -> None:
        """Compare with the model's own attention, in two pieces so that state must carry over.

        Layers that keep anything but keys and values (recurrences, say) fail here, whatever they
        are called.
        """
        kv = self.new_kv(1)
        ids = probe_ids(self.vocab_size, self.device)
        table = np.zeros((1, 1), dtype=np.int32)
        pieces = []
        for begin, end in ((0, 5), (5, PROBE_TOKENS)):
            span = np.array([0, end - begin, begin], dtype=np.int32)
            step = PackedStep(span[:1], span[1:2], span[2:], table)
            rows = torch.arange(end - begin, device=self.device)
            pieces.append(self.forward(ids[begin:end], rows + begin, step, kv, rows).float())
        self.num_forward_tokens = 0
        error = (torch.cat(pieces) - expected).pow(2).mean().sqrt()
        bound = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not error <= bound * expected.pow(2).mean().sqrt():
            raise CannotAttend(
                "with paged attention it computes something else than on its own "
                "(it keeps more than keys and values, or masks in a way of its own)"
            )


assert PAGE >= PROBE_TOKENS, "the probe uses one page"
