"""Layers that take less time than a host takes to launch their kernels: CUDA graphs, and shared products.

CUDA graphs of a model's body, all of it but the head, are two launches in place of thousands per micro-batch.
A pass of one shape runs as always the first time. The second time its forward and backward kernels are
captured, and later passes of the shape replay them: the same kernels, so the same numbers. Weights get their
gradients through autograd as before, in one node for all of them, so that hooks of DDP and ZeRO see them.

All graphs share one pool of memory: a micro-batch ends before the next one begins.

Linear layers that read the same input, gate and up, are one product. The first of them to be called
multiplies by the weights of all, one below the other, and the others take their parts. Weights stay where
they are, under their names: to put them together costs little compared with a product with the rows of a
micro-batch. The gradient of the input becomes one product too, summed in float32, where parts would be
rounded and added. Of queries, keys and values the products with A alone are one: the values of the backward
pass would hold the whole product, and to write three gradients side by side took longer on an H100 than three
products."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idlm.devices import free_cached_memory
from idlm.train.model.attention import SEEN, forget_clean_keys
from idlm.train.model.gated_lora import AdaptedLinear, GatedEmbedding, adapted, gate_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
SHORT_LAYER = 1 << 39
"""Multiply-adds of a layer's forward pass below which a host may launch it more slowly than a GPU runs it:
about 2 ms on an H100, and as much again for each of both products of the backward pass."""
MAX_GRAPHS = 16
"""An even number: those of gated batches come in pairs."""
MIN_FREE = 1 / 16
"""Of the device's memory, which the head, the optimizer and evaluations may still need."""
PARTS = 32
"""Gated batches are filled up to a multiple of their rows over this, so that few shapes come up."""


class CaptureError(Exception):
    """A pass cannot be captured, and `BodyGraphs` is off from now on: run the micro-batch again."""


@dataclass(slots=True, kw_only=True)
class _Graph:
    """A captured pass, whose output is of `kind`. `grad_output` and `gradients` (None for a weight that has
    none) where it has a backward pass. `addresses`: of all weights that it reads; `weights`: that train."""

    inputs: list[Tensor]
    forward: torch.cuda.CUDAGraph
    kind: type
    output: Tensor
    addresses: list[int]
    weights: Sequence[Tensor]
    backward: torch.cuda.CUDAGraph | None = None
    grad_output: Tensor | None = None
    gradients: tuple[Tensor | None, ...] = ()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, *weights: Tensor) -> Tensor:
        ctx.graph = graph
        graph.forward.replay()
        return graph.output.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        graph = ctx.graph
        graph.grad_output.copy_(grad_output)
        graph.backward.replay()
        # Copies, because autograd may store what it gets as `.grad`, and the next replay writes here again.
        found = [gradient for gradient in graph.gradients if gradient is not None]
        copies = [torch.empty_like(gradient) for gradient in found]
        torch._foreach_copy_(copies, found)
        rest = iter(copies)
        return None, *(None if gradient is None else next(rest) for gradient in graph.gradients)


class BodyGraphs:
    """Takes the place of the `forward` of `model`'s body. Passes are captured inside `running()` alone;
    elsewhere, as in evaluations, the body runs as before.

    `pair`: what else distinguishes shapes, for a body that runs twice per micro-batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.body = model, model.base_model
        self.own_forward = self.body.forward
        self.pair: Hashable = None
        self.is_on, self.is_running = True, False
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None
        self._held = 0
        self._stream: torch.cuda.Stream | None = None
        vars(self.body)["forward"] = self._forward

    @contextmanager
    def running(self) -> Iterator[None]:
        self.is_running = self.is_on
        try:
            yield
        finally:
            self.is_running = False

    def forget(self) -> None:
        """Give back the memory of all graphs, which are captured again when their shapes come next."""
        self._graphs.clear()
        self._pool, self._held = None, 0

    def release(self) -> None:
        """Forget all graphs; from now on the body runs as before."""
        self.is_on = self.is_running = False
        self.forget()

    def _forward(self, *args: Any, **given: Any) -> Any:
        if not self.is_running or args:
            return self.own_forward(*args, **given)
        tensors, key = self._split(given)
        graph = self._graphs.get(key)
        if graph is not None and graph.addresses != self._addresses():
            self.forget()
            graph = None
        if graph is None:
            if key not in self._seen or len(self._graphs) >= MAX_GRAPHS:
                self._seen.add(key)
                return self.own_forward(**given)
            graph = self._graphs[key] = self._captured(given, tensors)
            if given.get("clean_keys") == SEEN:
                # Replays read them at their addresses; held, their memory would be this shape's alone.
                forget_clean_keys(self.model)
        torch._foreach_copy_(graph.inputs, tensors)
        if graph.backward is None:
            graph.forward.replay()
            hidden = graph.output
        else:
            hidden = _Replay.apply(graph, *graph.weights)
        return graph.kind(last_hidden_state=hidden)

    def _addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self.body.parameters()]

    def _split(self, given: dict[str, Any]) -> tuple[list[Tensor], Hashable]:
        """The tensors of a call in a fixed order, and what its graph depends on."""
        tensors: list[Tensor] = []
        constants: list[Hashable] = [self.pair, torch.is_grad_enabled(), self.body.training]
        for name, value in given.items():
            parts = value if isinstance(value, tuple) else (value,)
            own = [part for part in parts if isinstance(part, Tensor)]
            tensors += own
            constants.append((name, len(own)) if own else (name, value))
        constants += [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        return tensors, tuple(constants)

    def _captured(self, given: dict[str, Any], tensors: list[Tensor]) -> _Graph:
        """The graph of a pass that has run before; raises CaptureError."""
        free_cached_memory()
        before = torch.cuda.mem_get_info()[0]
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        # A capture that fails leaves the generator waiting for its end.
        state = generator.clone_state()
        try:
            graph = self._capture(given, tensors)
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]
            self.release()
            generator.graphsafe_set_state(state)
            log.warning("no CUDA graphs of this model, which may train more slowly: %s", reason)
            raise CaptureError from error
        finally:
            torch.clear_autocast_cache()
        free, total = torch.cuda.mem_get_info()
        self._held += before - free
        # A new shape of a gated batch first runs outside the graphs, and takes as much again.
        if free < max(MIN_FREE * total, self._held if self.pair is not None else 0):
            self.release()
            log.info("no CUDA graphs: with them too little of the GPU's memory is left")
            raise CaptureError
        log.info("captured a CUDA graph of %d rows", tensors[0].numel())
        return graph

    def _capture(self, given: dict[str, Any], tensors: list[Tensor]) -> _Graph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        inputs = [tensor.clone() for tensor in tensors]
        rest = iter(inputs)
        static = {name: _with_tensors(value, rest) for name, value in given.items()}
        gradients, grad_output = tuple[Tensor | None, ...](), None
        # Threads that load data may meanwhile do on a GPU what a capture forbids.
        options: dict[str, Any] = {"pool": self._pool, "stream": self._stream}
        options["capture_error_mode"] = "thread_local"
        forward, backward = torch.cuda.CUDAGraph(), None
        with self._other_leaves() as leaves:
            # What is compiled or allocated at a first pass of the stream and the leaves.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                output = self.own_forward(**static).last_hidden_state
                if output.requires_grad:
                    torch.autograd.grad([output], leaves, [torch.zeros_like(output)], allow_unused=True)
            torch.clear_autocast_cache()
            with torch.cuda.graph(forward, **options):
                result = self.own_forward(**static)
            output = result.last_hidden_state
            if output.requires_grad:
                backward, grad_output = torch.cuda.CUDAGraph(), torch.empty_like(output)
                with torch.cuda.graph(backward, **options):
                    gradients = torch.autograd.grad([output], leaves, [grad_output], allow_unused=True)
        return _Graph(
            inputs=inputs,
            forward=forward,
            kind=type(result),
            output=output.detach(),
            addresses=self._addresses(),
            weights=list(_trained(self.body).values()),
            backward=backward,
            grad_output=grad_output,
            gradients=gradients,
        )

    @contextmanager
    def _other_leaves(self) -> Iterator[list[nn.Parameter]]:
        """Inside, other leaves of autograd, in the order of `_trained`, hold the trained weights. A pass
        waits for the stream on which a leaf was first used, and hooks of DDP and ZeRO hold their leaves."""
        leaves = {key: nn.Parameter(weight.detach()) for key, weight in _trained(self.body).items()}
        indices = [
            (module, name, weight)
            for module in self.body.modules()
            for name, weight in module._parameters.items()
            if id(weight) in leaves
        ]
        for module, name, weight in indices:
            module._parameters[name] = leaves[id(weight)]
        try:
            yield list(leaves.values())
        finally:
            for module, name, weight in indices:
                module._parameters[name] = weight


def _trained(body: nn.Module) -> dict[int, nn.Parameter]:
    return {id(weight): weight for weight in body.parameters() if weight.requires_grad}


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with the next `tensors` in place of its own."""
    if isinstance(value, tuple):
        return tuple(_with_tensors(part, tensors) for part in value)
    return next(tensors) if isinstance(value, Tensor) else value


def filled_up(num_rows: int, of_rows: int) -> int:
    """`num_rows` filled up to a multiple of a part of `of_rows`."""
    part = max(1, of_rows // PARTS)
    return -(-num_rows // part) * part


def can_capture(model: PreTrainedModel) -> bool:
    """Whether the body of `model` with compiled layers computes the same from the same tensors, on this
    device alone: no dropout, no rows that the embedding gets past its arguments."""
    gate, body = gate_of(model), model.base_model
    is_whole = body is not model and model.config._attn_implementation == "idlm_split"
    takes_rows = gate is not None and not gate.is_gated
    takes_rows = takes_rows and any(isinstance(module, GatedEmbedding) for module in model.modules())
    rates = vars(model.config.get_text_config())
    drops = any("dropout" in name and isinstance(rate, float) and rate > 0 for name, rate in rates.items())
    return is_whole and not takes_rows and not drops and not model.is_gradient_checkpointing


def replays(choice: str, device: torch.device, *, world_size: int) -> bool:
    """Whether to capture the body of a small model for `model.graphs` = `choice`; `auto`: on one GPU, because
    with several all gradients of a micro-batch would come at its end, and none be reduced before."""
    return device.type == "cuda" and (choice == "on" or (choice == "auto" and world_size == 1))


def is_short(layer_weights: float, *, num_rows: float, is_gated: bool) -> bool:
    """Whether a host may launch the pass of a layer over a micro-batch more slowly than a GPU runs it."""
    # Clean and noisy rows run apart.
    return layer_weights * num_rows / (2 if is_gated else 1) < SHORT_LAYER


GROUPS = {("gate_proj", "up_proj"): True, ("q_proj", "k_proj", "v_proj"): False}
"""Layers of one input, and whether they are one product; of the others the products with A alone are one."""


class SharedInput:
    """Computes `layers`, all plain or all adapted, each with a bias or none of them."""

    def __init__(self, layers: list[Any], *, is_one_product: bool) -> None:
        self.layers, self.is_one_product = layers, is_one_product
        self.x: Tensor | None = None
        self.parts: Sequence[Tensor] = []
        self.num_left = 0

    def output(self, x: Tensor, index: int) -> Tensor:
        """What the layer at `index` makes of `x`."""
        if self.x is not x:
            self.x, self.parts, self.num_left = x, self._outputs(x), len(self.layers)
        part = self.parts[index]
        self.num_left -= 1
        if self.num_left == 0:
            self.x, self.parts = None, []
        return part

    def _outputs(self, x: Tensor) -> Sequence[Tensor]:
        layers = self.layers
        sizes = [layer.out_features for layer in layers]
        is_adapted = isinstance(layers[0], AdaptedLinear) and layers[0].gate.is_open
        low = layers[0].reduced(x, torch.cat([layer.lora_A for layer in layers])) if is_adapted else None
        if not self.is_one_product:
            if low is None:
                return [functional.linear(x, layer.weight, layer.bias) for layer in layers]
            lows = low.split([len(layer.lora_A) for layer in layers], dim=-1)
            return [layer.of_reduced(x, part) for layer, part in zip(layers, lows, strict=True)]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat(biases) if biases else None
        if low is None:
            return functional.linear(x, weight, bias).split(sizes, dim=-1)
        parts = [layer.lora_B for layer in layers]
        return adapted(x, weight, bias, low, parts, layers[0].scaling).split(sizes, dim=-1)


class SharedLinear(nn.Linear):
    """A linear layer whose input other layers share: one product computes all of them."""

    shared: SharedInput
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return self.shared.output(input, self.index)


class SharedAdaptedLinear(AdaptedLinear):
    """`SharedLinear` with a gated LoRA."""

    shared: SharedInput
    index: int

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.output(x, self.index)


CLASSES: dict[type, type] = {nn.Linear: SharedLinear, AdaptedLinear: SharedAdaptedLinear}


def share_inputs(layers: nn.ModuleList) -> int:
    """Compute layers of one input together in all decoder `layers`; returns how many groups there are.
    Weights must be whole: not under ZeRO-3."""
    num_groups = 0
    for parent in layers.modules():
        for names, is_one_product in GROUPS.items():
            group: list[Any] = [getattr(parent, name, None) for name in names]
            if not all(type(one) in CLASSES for one in group):
                continue
            if not is_one_product and type(group[0]) is nn.Linear:
                continue
            if len({(type(one), one.in_features, one.bias is None) for one in group}) > 1:
                continue
            shared = SharedInput(group, is_one_product=is_one_product)
            for index, layer in enumerate(group):
                layer.__class__ = CLASSES[type(layer)]
                layer.shared, layer.index = shared, index
            num_groups += 1
    return num_groups
