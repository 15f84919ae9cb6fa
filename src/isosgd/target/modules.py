"""A ``torch.nn.Module`` as a log likelihood of named parameters."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import UninitializedParameter

from isosgd.errors import first_line, nearest, warn_caller
from isosgd.native import layers
from isosgd.target.batches import batch_length, inputs_of, labels_of, tensors_of, tree_map
from isosgd.target.likelihoods import NAMES, Bernoulli, Categorical, Gaussian, Likelihood, StudentT, Tokens
from isosgd.target.params import HALF, Params, match
from isosgd.target.priors import Extra
from isosgd.target.space import refuse_sharded

CHECKED_ROWS = 64
"""Rows of a batch that a check passes through the module; values are checked in all rows."""

MOST_COLUMNS, ENOUGH_ROWS, UNLIKE = 50, 20, 2.0
"""Of ``y``: the most columns, the least rows and the least ratio of residuals to warn of a noise scale they share."""

Select = str | Sequence[str] | Callable[[str, nn.Parameter], bool]
Autocast = Literal["bfloat16", "float16"]
MASK = "attention_mask"


def unwrapped(model: Any) -> Any:
    """The module inside DDP or `torch.compile`; any other module as it is."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    # The class of compiled modules is private and slow to import.
    compiled = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
    return model if compiled is None else unwrapped(compiled)


class ModuleLikelihood:
    """``log_likelihood(params, batch)`` of a module and a likelihood.

    The user's module is never written to. Its structure, buffers and sampled values are copied; frozen parameters are
    shared, so that a last layer on a large backbone costs little memory. Batches are ``(x, y)`` or ``(x1, x2, ...,
    y)``, where all but the last go to the module, or dicts, where all but the labels do, by name.

    Args:
        model: any module with floating-point parameters.
        likelihood: one of `isosgd.likelihoods`, its name, or a callable ``(output, y) -> Tensor[n]``.
        sampled: which parameters to sample, see `select`.
        autocast: ``"bfloat16"`` or ``"float16"`` for forward passes in mixed precision.
        channels_last: hold images and filters channels last, which is faster on a GPU.
        labels: name of the labels in dict batches; by default the first of `isosgd.target.batches.LABELS` found there.

    Attributes:
        low: dtypes of the sampled parameters in half precision; `values` are in float32.
        labels: as given.
        aliases: other names of tied parameters, as in a ``state_dict``, with the names under which they are sampled.
        buffers: copies of the module's buffers, never changed.
        ties_examples: whether a BatchNorm layer normalises by the statistics of the minibatch, so that the likelihood
            of an example depends on the rest of its batch.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | Callable[[Any, Tensor], Tensor],
        sampled: Select = "all",
        autocast: Autocast | None = None,
        channels_last: bool = False,
        labels: str | None = None,
    ) -> None:
        if labels is not None and not isinstance(labels, str):
            raise TypeError(f"labels = {labels!r} must be the name that the labels have in a batch")
        self.labels = labels
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        for name, p in model.named_parameters():
            refuse_sharded(name, p)
        self.likelihood = as_likelihood(likelihood)
        self.autocast, self.channels_last = as_autocast(autocast), bool(channels_last)
        names = select(model, sampled)
        warn_of_layers(model)
        frozen = [p for name, p in model.named_parameters() if name not in names]
        try:
            self._module = copy.deepcopy(model, {id(p): p for p in frozen})
        except Exception as error:
            raise TypeError(f"the structure of {type(model).__name__} cannot be copied: {error}") from error
        _to_evaluation(self._module)
        parameters = dict(self._module.named_parameters())
        if self.channels_last:
            for p in parameters.values():
                if p.dim() == 4 and not any(p is q for q in frozen):
                    p.data = p.data.contiguous(memory_format=torch.channels_last)
        self.low = {name: parameters[name].dtype for name in names if parameters[name].dtype in HALF}
        self.values: Params = {
            name: parameters[name].detach().to(torch.float32 if name in self.low else parameters[name].dtype)
            for name in names
        }
        self._class_name = type(model).__name__
        self._frozen = [name for name in parameters if name not in self.values]
        self._home = _kind(next(iter(self.values.values())))
        rest = {name: parameters[name].detach() for name in self._frozen} | dict(self._module.named_buffers())
        self._rest = {self._home: rest}  # frozen parameters and buffers, by device and type
        self.aliases = {alias: name for _, _, name, alias in _places(self._module) if alias != name}
        self.place(self._module)
        self.buffers: Params = {name: x.detach().clone() for name, x in self._module.named_buffers()}
        self._batch_norms = [m for m in self._module.modules() if isinstance(m, _BatchNorm)]
        self.ties_examples = any(m.training or m.running_mean is None for m in self._batch_norms)
        # Normalising by the minibatch needs no running statistics, which are computed for each draw (`refreshed`).
        self._refreshed = [m for m in self._batch_norms if m.training and m.running_mean is not None]
        for norm in self._refreshed:
            norm.track_running_stats = False
        self._told_of_probabilities = self._told_of_one_scale = False

    def place(self, module: nn.Module) -> None:
        """Use a module, which has the sampled parameters, for forward passes."""
        places = list(_places(module))
        self._module = module
        self._sampled_places = [place for place in places if place[2] in self.values]
        self._rest_places = [place for place in places if place[2] in self._rest[self._home]]
        self._put_rest(self._home)

    def other_layer(self, model: nn.Module) -> tuple[str, str] | None:
        """The first layer of a model that is of another class than here, and that class; dropout does not count."""
        for theirs, ours in itertools.zip_longest(_layers(model), _layers(self._module), fillvalue="nothing more"):
            if theirs != ours:
                return theirs, ours
        return None

    @property
    def recurrent(self) -> str:
        """Path of a recurrent layer; empty if there is none."""
        paths = (path or "model" for path, layer in self._module.named_modules() if isinstance(layer, nn.RNNBase))
        return next(paths, "")

    @property
    def convolves(self) -> bool:
        """Whether there are convolutions."""
        return any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in self._module.modules())

    def head_path(self) -> str:
        """Path of the smallest submodule that holds all sampled parameters; empty if that is the model."""
        levels = zip(*(alias.split(".")[:-1] for _, _, _, alias in self._sampled_places), strict=False)
        return ".".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, levels))

    def extra(self) -> dict[str, Extra]:
        """Sampled parameters of the likelihood."""
        return self.likelihood.extra() if isinstance(self.likelihood, Likelihood) else {}

    def output(self, params: Params, inputs: Sequence[Any] | Mapping[str, Any]) -> Any:
        """The module's output at these parameters."""
        first = params[self._sampled_places[0][2]]
        kind, params = _kind(first), self.lowered(params)
        if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(first):
            # Tensors of a torch.func transform must not stay in the module.
            rest = self._rest_as(kind)
            state = {alias: params[name] for _, _, name, alias in self._sampled_places}
            state |= {alias: rest[name] for _, _, name, alias in self._rest_places}
            return self._pass(
                lambda *x, **named: functional_call(self._module, state, x, named, tie_weights=False), inputs, first
            )
        # The module is our copy, so tensors are put into it directly. functional_call, which also restores the old
        # ones, costs about half a forward pass of a small network.
        if kind != self._placed:
            self._put_rest(kind)
        for slots, key, name, _ in self._sampled_places:
            slots[key] = params[name]
        return self._pass(self._module, inputs, first)

    def _pass(self, module: Callable[..., Any], inputs: Sequence[Any] | Mapping[str, Any], like: Tensor) -> Any:
        """A forward pass in the chosen precision and memory format."""
        if self.channels_last:
            inputs = tree_map(lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x, inputs)
        args, named = self.arguments(inputs)
        if self.autocast is None:
            return module(*args, **named)
        with torch.autocast(like.device.type, self.autocast, cache_enabled=False):
            output = module(*args, **named)
        return output.to(like.dtype) if isinstance(output, Tensor) and output.is_floating_point() else output

    # -- buffers ------------------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, buffers: Params) -> Iterator[None]:
        """Use these buffers, which forward passes may change, inside a ``with`` block."""
        unknown = [name for name in buffers if name not in self.buffers]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no buffer of {self._class_name}; they are {list(self.buffers)}")
        before = {kind: dict(rest) for kind, rest in self._rest.items()}
        try:
            for rest in self._rest.values():
                rest.update(buffers)
            self._put_rest(self._placed)
            yield
        finally:
            self._rest = before  # drop copies made for another device meanwhile
            self._put_rest(self._placed)

    @property
    def frozen(self) -> Params:
        """The module's parameters that are not sampled."""
        return {name: self._rest[self._home][name].detach() for name in self._frozen}

    @property
    def transient(self) -> set[str]:
        """Names of the buffers that are not in a ``state_dict``."""
        return set(self.buffers) - set(self._module.state_dict())

    @property
    def statistics(self) -> list[str]:
        """Names of the BatchNorm statistics that are computed for each draw."""
        own = {id(m) for m in self._refreshed}
        return [
            f"{prefix}.{kind}" if prefix else kind
            for prefix, m in self._module.named_modules()
            if id(m) in own
            for kind in ("running_mean", "running_var", "num_batches_tracked")
            if getattr(m, kind) is not None
        ]

    @torch.no_grad()
    def refreshed(self, params: Params, batches: Iterable[Any]) -> Params:
        """BatchNorm statistics at these parameters: plain averages over batches, as `torch.optim.swa_utils.update_bn`.

        Args:
            batches: of examples, as in the data.
        """
        first = params[self._sampled_places[0][2]]
        rest = self._rest_as(_kind(first))
        found = {name: torch.zeros_like(rest[name]) for name in self.statistics}
        momenta = [m.momentum for m in self._refreshed]
        try:
            for m in self._refreshed:
                m.track_running_stats, m.momentum = True, 0.0
            with self.using(found):
                for i, batch in enumerate(batches):
                    for m in self._refreshed:
                        m.momentum = 1.0 / (i + 1)
                    self.output(params, inputs_of(batch, self.labels))
        finally:
            for m, momentum in zip(self._refreshed, momenta, strict=True):
                m.track_running_stats, m.momentum = False, momentum
        return found

    # -- inputs, outputs and layers
    # ---------------------------------------------------------------------------------------

    def lowered(self, params: Params) -> Params:
        """Parameters in the module's own precision: half precision is sampled in float32 and rounded here.

        Most steps are smaller than the spacing of bfloat16 numbers.
        """
        return params if not self.low else {**params, **{name: params[name].to(low) for name, low in self.low.items()}}

    def arguments(self, inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs as positional and named arguments of the module, floating-point ones in its precision."""
        if self.low:
            low = next(iter(self.low.values()))
            inputs = tree_map(lambda x: x.to(low) if x.is_floating_point() else x, inputs)
        return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})

    def dtype_as(self, x: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Dtype of a frozen tensor: that of the parameters, or its own in a module of half precision."""
        return dtype if x.is_floating_point() and not self.low else x.dtype

    def _rest_as(self, kind: tuple[torch.device, torch.dtype]) -> Params:
        """Frozen parameters and buffers on the device and in the dtype of the sampled parameters."""
        if kind not in self._rest:
            device, dtype = kind
            self._rest[kind] = {
                name: x.to(device, self.dtype_as(x, dtype)) for name, x in self._rest[self._home].items()
            }
        return self._rest[kind]

    def _put_rest(self, kind: tuple[torch.device, torch.dtype]) -> None:
        rest = self._rest_as(kind)
        for slots, key, name, _ in self._rest_places:
            slots[key] = rest[name]
        self._placed = kind

    def __call__(self, params: Params, batch: Any) -> Tensor:
        """Log likelihood of each example."""
        output = self.output(params, inputs_of(batch, self.labels))
        if isinstance(self.likelihood, Likelihood):
            output, params = self.for_likelihood(output, params)
            return self.likelihood.log_prob(output, self.labels_in(batch), params)
        return self.likelihood(output, self.labels_in(batch))

    def for_likelihood(self, output: Any, params: Params) -> tuple[Any, Params]:
        """Output and parameters as the likelihood takes them."""
        return self.logits(output, params), params

    def logits(self, output: Any, params: Params) -> Any:
        """`logits_of` an output, in the parameters' dtype if they are in half precision."""
        found = logits_of(output)
        if isinstance(found, Tensor) and found.dtype in HALF:
            return found.to(params[self._sampled_places[0][2]].dtype)
        return found

    def as_inputs(self, x: Any) -> Any:
        """A user's inputs for prediction as inputs of the module; a dict may contain labels."""
        if isinstance(x, Mapping):
            return inputs_of(x, self.labels)
        return x if isinstance(x, tuple | list) else (x,)

    def inputs_in(self, batch: Any) -> Any:
        """The module's inputs in a batch."""
        return inputs_of(batch, self.labels)

    def labels_in(self, batch: Any) -> Any:
        """The labels of a batch; tokens outside its attention mask get the ignored label."""
        y = labels_of(batch, self.labels)
        mask = batch.get(MASK) if isinstance(batch, Mapping) and isinstance(self.likelihood, Tokens) else None
        if mask is None or mask.shape != y.shape:
            return y
        return y.masked_fill(mask == 0, self.likelihood.ignore)  # type: ignore[union-attr]

    @property
    def batched(self) -> bool:
        """Whether one pass takes the parameters of many chains, as the module's attribute ``batched`` says."""
        return isinstance(self.likelihood, Likelihood) and getattr(self._module, "batched", False) is True

    @property
    def layered(self) -> bool:
        """Whether it is `batched`, its layers are those of `isosgd.native.layers`, and derivatives are known."""
        closed = isinstance(self.likelihood, Likelihood) and type(self.likelihood).slopes is not Likelihood.slopes
        return closed and self.batched and hasattr(self._module, "arranged")

    def by_chain(self, params: Params, batch: Any) -> Tensor:
        """Log likelihoods ``[chains, n]``; parameters and batch have a leading dimension of chains."""
        assert isinstance(self.likelihood, Likelihood)
        own, output, y = {name: params[name] for name in self.extra()}, self.output(params, batch[:-1]), batch[-1]
        if type(self.likelihood) not in NAMES.values():
            return vmap(self.likelihood.log_prob)(output, y, own)
        # Rows of all chains are one batch, each with the scale of its chain; vmap would double the time.
        return self.likelihood.log_prob(output.flatten(0, 1), y.flatten(0, 1), self._by_row(own, y)).view(y.shape[:2])

    def slopes_by_chain(self, found: Tensor, own: Params, y: Tensor) -> tuple[Tensor, Tensor, Params]:
        """Log likelihoods ``[chains, n]`` from the output of the layers of a `layered` module, and their derivatives.

        Derivatives are in the output, per row, and in the likelihood's own parameters, summed over rows and over the
        outputs that share them.
        """
        assert isinstance(self.likelihood, Likelihood)
        arranged: Any = getattr(self._module, "arranged", _as_it_is)
        output = arranged(found).flatten(0, 1)
        each, slope, by_row = self.likelihood.slopes(output, y.flatten(0, 1), self._by_row(own, y))
        rest = {name: by_row[name].reshape(len(y), -1, *s.shape[1:]).sum(1) for name, s in own.items()}
        return each.view(y.shape[:2]), arranged(slope, back=True).view_as(found), rest

    @staticmethod
    def _by_row(own: Params, y: Tensor) -> Params:
        """Parameters of chains, repeated for the rows of each chain."""
        last = (-1,) if y.dim() > 2 else ()
        spread = {name: s.reshape(len(y), 1, *last).expand(-1, y.shape[1], *last) for name, s in own.items()}
        return {name: s.flatten(0, 1) for name, s in spread.items()}

    def network(self) -> layers.Network | None:
        """The network of dense layers, if all are sampled and the likelihood has derivatives; else None."""
        # The slopes of a class are those of its own log_prob, not of one that a subclass has.
        if self.autocast is not None or self.low or self.aliases or "slopes" not in vars(type(self.likelihood)):
            return None
        network = layers.network_of(self._module)
        return network if network is not None and list(self.values) == network.names else None

    def predict(self, params: Params, x: Any) -> Any:
        """Mean and noise variance of y; the module's output if the likelihood is a callable."""
        output, params = self.for_likelihood(self.output(params, self.as_inputs(x)), params)
        return self.likelihood.predict(output, params) if isinstance(self.likelihood, Likelihood) else output

    def check(self, params: Params, batch: Any) -> Any:
        """Check form and values of a batch, and that the output is not random. Returns its first rows."""
        if not isinstance(batch, Mapping) and (not isinstance(batch, (tuple, list)) or len(batch) < 2):
            found = f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
            raise ValueError(f"a batch must be (x, y) or (x1, x2, ..., y) or a dict with labels, got a {found}")
        y = self.labels_in(batch)
        self._check_values(batch, y)
        n, tensors = batch_length(batch), isinstance(batch, Mapping) or all(isinstance(part, Tensor) for part in batch)
        place = params[self._sampled_places[0][2]].device
        head = batch if not tensors else tree_map(
            lambda t: (t[:CHECKED_ROWS] if t.ndim and len(t) == n else t).to(place), batch
        )  # fmt: skip
        inputs = inputs_of(head, self.labels)
        output, again = (self._tried(params, inputs, inputs_of(batch, self.labels)) for _ in range(2))
        if isinstance(output, Tensor) and not torch.allclose(output, again, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"{self._class_name} gives different outputs for the same input, so the posterior is not defined; "
                "turn off what is random in its forward()"
            )
        if isinstance(self.likelihood, Likelihood):
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"the model's output is a {type(output).__name__}, neither a tensor nor one with logits; give a "
                    "callable likelihood"
                )
            self.likelihood.check(output, y)
            self._warn_of_probabilities(output)
            self._warn_of_one_scale(output, y[: len(output)])
        return head

    def check_inputs(self, params: Params, x: Any) -> None:
        """Check form and values of inputs for prediction, and that the module takes the first of them."""
        inputs = self.as_inputs(x)
        if not tensors_of(inputs):
            raise TypeError(
                f"inputs of type {type(x).__name__}: pass tensors or arrays as {self._class_name} takes them, one row "
                "an example; batches of a loader can be joined by torch.cat"
            )
        self._check_finite(inputs)
        n, place = batch_length(inputs), params[self._sampled_places[0][2]].device
        if n:
            head = tree_map(lambda t: (t[:2] if t.ndim and len(t) == n else t).to(place), inputs)
            self._tried(params, head, inputs)

    def _tried(self, params: Params, inputs: Any, whole: Any) -> Any:
        """The output for a few rows; raises an error if the module cannot take them, or gives no row for each."""
        try:
            output = self.logits(self.output(params, inputs), params)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            shapes = ", ".join(str(list(t.shape)) for t in tensors_of(whole))
            raise ValueError(
                f"{self._class_name} cannot take inputs of shape {shapes}: {first_line(error)}"
                f"{self._other_type(params, inputs, error)}"
            ) from error
        rows = batch_length(inputs)
        if isinstance(self.likelihood, Likelihood) and isinstance(output, Tensor) and output.shape[:1] != (rows,):
            raise ValueError(
                f"{self._class_name} gives an output of shape {list(output.shape)} for {rows} examples: its first "
                "dimension must be that of the examples; a single one is x[None]"
            )
        return output

    def _other_type(self, params: Params, inputs: Any, error: Exception) -> str:
        """Advice if an error may come from inputs of another dtype than the parameters'."""
        wanted = params[self._sampled_places[0][2]].dtype
        other = next((t.dtype for t in tensors_of(inputs) if t.dtype != wanted), None)
        if other is None or not ("type" in str(error) and str(wanted).startswith("torch.float")):
            return ""
        return f". The inputs are {other}, the parameters {wanted}: pass x.to({wanted}), or convert the model"

    def _warn_of_probabilities(self, output: Tensor) -> None:
        """Warn once if outputs are probabilities where logits are expected."""
        last = next(reversed(list(self._module.modules())))
        low, sums = bool((output >= 0).all()), output.sum(-1)
        if isinstance(self.likelihood, Categorical):
            found = output.ndim == 2 and len(output) > 1 and low and bool((sums - 1).abs().max() < 1e-3)
        else:
            found = isinstance(self.likelihood, Bernoulli) and isinstance(last, nn.Sigmoid) and low
        if found and not self._told_of_probabilities:
            self._told_of_probabilities = True
            name = type(self.likelihood).__name__.lower()
            warn_caller(
                f"the outputs of {self._class_name} are probabilities, and {name!r} takes logits: leave the model's "
                "last softmax or sigmoid out, unless it was trained with both"
            )

    def _warn_of_one_scale(self, output: Tensor, y: Tensor) -> None:
        """Warn once if columns of ``y`` share a sampled noise scale although their residuals differ in size."""
        shared = isinstance(self.likelihood, Gaussian | StudentT) and self.likelihood.outputs is None and self.extra()
        if self._told_of_one_scale or not shared or y.shape != output.shape or y.ndim != 2:
            return
        if not (2 <= y.shape[1] <= MOST_COLUMNS and len(y) >= ENOUGH_ROWS):
            return
        low, high = (float(x) for x in (output.detach().to(y) - y).float().square().mean(0).sqrt().aminmax())
        if high > UNLIKE * low:
            self._told_of_one_scale = True
            name = type(self.likelihood).__name__
            warn_caller(
                f"the columns of y share one noise scale, but residuals of the network have sizes from {low:.2g} to "
                f"{high:.2g}: likelihoods.{name}(outputs={y.shape[1]}) samples a scale for each"
            )

    @staticmethod
    def _check_finite(parts: Any, y: Any = None) -> None:
        """All values of a batch or of inputs must be finite."""
        named = dict(parts) if isinstance(parts, Mapping) else {f"input {i}": part for i, part in enumerate(parts)}
        for name, part in named.items():
            if isinstance(part, Tensor) and part.is_floating_point() and (bad := int((~part.isfinite()).sum())):
                where = "y" if part is y else name
                first = int((~part.isfinite()).reshape(len(part), -1).any(1).nonzero()[0]) if part.ndim else 0
                raise ValueError(
                    f"{where} has {bad} values that are NaN or infinite, in row {first} first; drop or mend these rows"
                )

    def _check_values(self, batch: Any, y: Any) -> None:
        """Values must be finite and fit the module, and masks must leave something."""
        if isinstance(self.likelihood, Likelihood) and not isinstance(y, Tensor):
            raise TypeError(f"y is of type {type(y).__name__}: pass a tensor or an array, one row an example")
        if isinstance(y, Tensor) and y.ndim and (n := batch_length(batch)) != len(y):
            raise ValueError(f"the inputs have {n} examples and y has {len(y)}: give one row of y for each")
        self._check_finite(batch, labels_of(batch, self.labels))
        if not isinstance(batch, Mapping):
            return
        takes = inspect.signature(self._module.forward).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in takes):
            unknown = [name for name in inputs_of(batch, self.labels) if name not in {p.name for p in takes}]
            if unknown:
                raise ValueError(
                    f"a batch has {unknown[0]!r}, which {self._class_name}.forward() does not take: leave it out"
                )
        mask = batch.get(MASK)
        if isinstance(mask, Tensor) and mask.ndim == 2 and bool((empty := (mask == 0).all(1)).any()):
            raise ValueError(
                f"the {MASK} of {int(empty.sum())} of {len(mask)} examples is all zeros, of example "
                f"{int(empty.nonzero()[0])} first: it leaves no token. Leave such examples out"
            )

    def describe(self) -> dict[str, Any]:
        """The model and its likelihood as plain values."""
        if isinstance(self.likelihood, Likelihood):
            likelihood = self.likelihood.describe()
        else:
            likelihood = {"name": getattr(self.likelihood, "__qualname__", "callable"), "callable": True}
        found = {"model": self._class_name, "likelihood": likelihood, "frozen": list(self._frozen)}
        return found if self.autocast is None else found | {"autocast": str(self.autocast).removeprefix("torch.")}


def _as_it_is(found: Tensor, back: bool = False) -> Tensor:
    """The output of a network's layers, where a module does nothing else to it."""
    return found


def logits_of(output: Any) -> Any:
    """The part of an output that a likelihood takes: its ``logits``, the first of a tuple, or all of it."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, tuple | list) and output else output


def _kind(x: Tensor) -> tuple[torch.device, torch.dtype]:
    return x.device, x.dtype


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, str]]:
    """For each place of a tensor in a module: the dict and key that hold it, its first name, and its name there.

    A tied tensor has several places and one first name.
    """
    first: dict[int, str] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for slots in (owner._parameters, owner._buffers):
            for key, x in slots.items():
                if x is not None:
                    alias = f"{prefix}.{key}" if prefix else key
                    yield slots, key, first.setdefault(id(x), alias), alias


def as_autocast(name: object) -> torch.dtype | None:
    """The name of a mixed precision as a dtype."""
    if name is None or name in HALF:
        return name
    if name not in ("bfloat16", "float16"):
        raise ValueError(f"autocast = {name!r} is unknown; choose 'bfloat16', 'float16' or None")
    return torch.bfloat16 if name == "bfloat16" else torch.float16


def check_autocast(dtype: torch.dtype | None, device: torch.device) -> None:
    """Check that a device supports the mixed precision."""
    if dtype is None:
        return
    name = str(dtype).removeprefix("torch.")
    if not torch.amp.is_autocast_available(device.type):
        raise ValueError(f"autocast = {name!r}: a device of type {device.type!r} has no autocast; leave it out")
    if device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(f"autocast = {name!r}: {torch.cuda.get_device_name(device)} lacks it; leave it out")


def as_likelihood(likelihood: object) -> Likelihood | Callable[[Any, Tensor], Tensor]:
    """A likelihood in any of the accepted forms, as a likelihood or callable."""
    if isinstance(likelihood, str):
        if likelihood not in NAMES:
            raise ValueError(
                f"likelihood = {likelihood!r} is not known; choose one of {sorted(NAMES)}{nearest(likelihood, NAMES)}"
            )
        return NAMES[likelihood]()
    if isinstance(likelihood, type) and issubclass(likelihood, Likelihood):
        return likelihood()
    if isinstance(likelihood, _Loss) or getattr(likelihood, "__module__", "") == F.__name__:
        raise ValueError(
            f"likelihood = {getattr(likelihood, '__name__', likelihood)} is a loss, the negative of a log likelihood: "
            "pass a name, 'categorical' for the cross entropy, 'bernoulli' for the binary one, 'gaussian' for squares"
        )
    if isinstance(likelihood, Likelihood) or callable(likelihood):
        return likelihood
    raise TypeError(f"likelihood must be one of isosgd.likelihoods, a name or a callable, got {likelihood!r}")


def select(model: nn.Module, sampled: Select) -> list[str]:
    """Names of the parameters to sample.

    Args:
        model: any module.
        sampled: ``"all"`` or ``"requires_grad"``, those that require gradients; ``"last_layer"``, the module with the
            last of those; names or shell patterns such as ``"*.bias"``; or a callable ``(name, parameter) -> bool``.

    Example:
        >>> select(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), ["0.weight", "1.*"])
        ['0.weight', '1.weight', '1.bias']
    """
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if isinstance(p, UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet; run the model once on an input first")
    trainable = [name for name, p in parameters.items() if p.requires_grad]
    if sampled in ("all", "requires_grad"):
        names = trainable
    elif sampled == "last_layer":
        last = trainable[-1].rpartition(".")[0] if trainable else ""
        names = [name for name in trainable if name.rpartition(".")[0] == last]
    elif callable(sampled):
        names = [name for name, p in parameters.items() if sampled(name, p)]
    elif isinstance(sampled, str) or (isinstance(sampled, Sequence) and all(isinstance(x, str) for x in sampled)):
        patterns = [sampled] if isinstance(sampled, str) else list(sampled)
        for pattern in patterns:
            if not any(match(name, [pattern]) for name in parameters):
                raise ValueError(
                    f"sampled = {sampled!r}: {pattern!r} fits none of {_some(list(parameters))}; choose names or "
                    "patterns of these, 'all', 'last_layer' or a callable (name, parameter) -> bool"
                )
        names = [name for name in parameters if match(name, patterns)]
    else:
        raise ValueError(
            f"sampled = {sampled!r}; choose 'all', 'requires_grad', 'last_layer', names or patterns, or a callable "
            "(name, parameter) -> bool"
        )
    if not names:
        raise ValueError(
            f"sampled = {sampled!r} picks none of the {len(parameters)} parameters of {type(model).__name__}; "
            "set requires_grad on those to sample, or choose others"
        )
    for name in names:
        if not parameters[name].is_floating_point():
            raise TypeError(
                f"parameter {name!r} is {parameters[name].dtype}; only real floating-point ones can be sampled"
            )
    return names


def _some(names: list[str], most: int = 8) -> str:
    return f"{names}" if len(names) <= most else f"{names[:most]} and {len(names) - most} more"


def warn_of_layers(model: nn.Module) -> None:
    """Warn of layers that are random in training mode, and of layers that tie the examples of a batch together."""
    tied, random = [], []
    for name, module in model.named_modules():
        where = f"layer {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if module.training and _is_random(module):
            random.append(where)
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            tied.append(where)
    _warn(
        random, "is", "are",
        "dropout is off: {} random in training mode, under which no posterior is defined; the target uses evaluation "
        "mode (model.eval() says that you know)",
    )  # fmt: skip
    _warn(
        tied, "uses", "use",
        "{} the statistics of the minibatch, so the likelihood of an example depends on the rest of its batch; call "
        "model.eval() first, or use GroupNorm or LayerNorm, for a well-defined posterior",
    )  # fmt: skip


def _warn(layers: list[str], one: str, several: str, text: str) -> None:
    if layers:
        more = len(layers) - 1
        who = f"{layers[0]} {one}" if not more else f"{layers[0]} and {more} other layer{'s' * (more > 1)} {several}"
        warnings.warn(text.format(who), UserWarning, stacklevel=5)


def _layers(model: nn.Module) -> list[str]:
    """Classes of the layers that have no layers within."""
    passing = nn.Identity, _DropoutNd
    return [type(m).__name__ for m in model.modules() if not [*m.children()] and not isinstance(m, passing)]


def _to_evaluation(module: nn.Module) -> None:
    """Evaluation mode for all layers but BatchNorm in training mode."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase) and layer.training:
            layer.dropout = 0.0  # no evaluation mode, in which cuDNN has no gradients
        elif not isinstance(layer, _BatchNorm):
            layer.training = False


def _is_random(module: nn.Module) -> bool:
    """Whether a layer in training mode draws random numbers."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)
