"""The posterior to sample: a log likelihood, a prior, and the number of data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from isosgd.names import layer_of
from isosgd.native.layers import Network
from isosgd.target.batches import batch_length, count_examples, inputs_of, labels_of
from isosgd.target.likelihoods import Likelihood
from isosgd.target.modules import Autocast, ModuleLikelihood, Select, check_autocast, unwrapped
from isosgd.target.params import Params
from isosgd.target.priors import Empirical, FanInNormal, Flat, Joint, Normal, PriorLike, WeightDecay, as_prior
from isosgd.target.space import FlatPrior, Space, as_parameter


class Target:
    """A posterior density over named parameters, ``exp(sum_i log_likelihood_i + log_prior)``.

    Users write densities in *natural* parameters. Samplers move *free* ones, where a positive parameter is held as its
    logarithm; the Jacobian is added here. Losses and gradients are in mean units: the mean negative log likelihood of
    the minibatch plus the negative log prior over N.

    Args:
        log_likelihood: ``(params, batch) -> Tensor[n]``, one log likelihood for each example.
        prior: one of `isosgd.priors`; or a mapping from names or shell patterns to priors, in which every
            parameter must find one; or a callable ``params -> scalar`` log density; or ``"empirical"``.
        num_data: N, the number of examples in all; found from the data when they have a length.
        positive: names or patterns of the parameters that are positive.
        init: start values in natural parameters.
        predict: ``(params, x) -> Tensor`` or a dict of tensors, for ``Posterior.predict``.

    Example:
        >>> from isosgd.target import Target, priors
        >>> x = torch.linspace(-1, 1, 50)
        >>> def log_likelihood(params, batch):
        ...     x, y = batch
        ...     return -0.5 * ((y - params["slope"] * x) / params["sigma"]) ** 2 - params["sigma"].log()
        >>> prior = {"slope": priors.Normal(10.0), "sigma": priors.HalfNormal(1.0)}
        >>> start = {"slope": torch.tensor(0.0), "sigma": torch.tensor(1.0)}
        >>> target = Target(log_likelihood, prior, positive=["sigma"], init=start)
        >>> target.resolve_num_data((x, 2 * x))
        50
    """

    def __init__(
        self,
        log_likelihood: Callable[[Params, Any], Tensor],
        prior: PriorLike,
        *,
        num_data: int | None = None,
        positive: Collection[str] = (),
        init: Mapping[str, Any] | None = None,
        predict: Callable[[Params, Any], Any] | None = None,
    ) -> None:
        if not callable(log_likelihood):
            raise TypeError(f"log_likelihood must be a callable (params, batch) -> Tensor[n], got {log_likelihood!r}")
        if num_data is not None and (isinstance(num_data, bool) or not isinstance(num_data, Integral)):
            raise TypeError(f"num_data must be an integer, got {num_data!r}")
        if num_data is not None and num_data < 1:
            raise ValueError(f"num_data = {num_data}: the number of examples must be at least 1")
        if predict is not None and not callable(predict):
            raise TypeError(f"predict must be a callable (params, x), got {predict!r}")
        self.num_data: int | None = None if num_data is None else int(num_data)
        self._log_likelihood = log_likelihood
        self._prior = as_prior(prior)
        self._patterns = (positive,) if isinstance(positive, str) else tuple(positive)
        self._predict = predict
        self._tempered: Literal["both", "likelihood"] = "both"
        self._own = log_likelihood.extra() if isinstance(log_likelihood, ModuleLikelihood) else {}
        self._checked = False
        self._prior_num_data: int | None = self.num_data  # for priors that depend on N
        self._space: Space | None = None
        self._fixed = init is not None
        if init is not None:
            values = {name: as_parameter(name, value) for name, value in init.items()}
            self._prior = self._prior.at(values) if values else self._prior  # `Space` raises an error for an empty init
            self._space = self._make_space(values)
            self.initial()  # checks start values

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        likelihood: str | Likelihood | Callable[[Any, Tensor], Tensor],
        prior: PriorLike | None = None,
        *,
        num_data: int | None = None,
        sampled: Select = "all",
        autocast: Autocast | None = None,
        channels_last: bool = False,
        weight_decay: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        labels: str | None = None,
    ) -> Target:
        """The posterior of a network's parameters.

        The module itself is never written to. The target copies its structure, buffers and sampled values as they
        are now. Frozen parameters are shared, not copied: do not train them while sampling. Chains start at the
        module's values. The copy is in evaluation mode whatever the mode of the module, so that dropout is off; only
        BatchNorm that was in training mode still normalises by the minibatch.

        Args:
            model: any module; DistributedDataParallel is unwrapped. Batches are ``(x, y)`` or ``(x1, x2, ..., y)``,
                where all but the last are inputs; or dicts, as tokenizers and Hugging Face's collators make them:
                ``model(**inputs)`` of all but the labels. If the output has ``logits`` these are used, if it is a tuple
                its first entry.
            likelihood: one of `isosgd.likelihoods`, its name (``"categorical"``, ``"tokens"``, ``"bernoulli"``,
                ``"gaussian"``, ``"student_t"``, ``"heteroscedastic"``, ``"heteroscedastic_t"``, ``"poisson"``), or a
                callable ``(output, y) -> Tensor[n]``.
            prior: as for `Target`; ``FanInNormal()`` by default, under which a network's outputs are of order one
                prior: as for `Target`; ``FanInNormal()`` by default, under which outputs are of order one for any
                    width. With enough data ``HierarchicalNormal()`` learns the scales. For a trained network
                    ``"empirical"`` takes them from its values, see `isosgd.priors.Empirical`.
            num_data: N, found from the data when they have a length.
            sampled: ``"all"`` parameters with ``requires_grad`` (also as ``"requires_grad"``); ``"last_layer"``, the
                module that holds the last of those; names or shell patterns such as ``["*lora_*", "score.*"]``; or a
                callable ``(name, parameter) -> bool``. The others stay as they are. If all sampled parameters are in
                the head, `sample` computes its inputs once. Parameters in bfloat16 or float16 are sampled in float32
                and rounded for forward passes.
            autocast: ``"bfloat16"`` or ``"float16"``: forward passes run in mixed precision, parameters stay as they
                are. On a recent GPU bfloat16 about halves the time of a large network.
            channels_last: hold images and filters channels last, which convolutions on a GPU prefer.
            weight_decay: the decay that SGD or Adam had in training, as a prior of precision decay * N, see
                `isosgd.priors.WeightDecay`.
            optimizer: the one used in training; takes its decay of each parameter. AdamW is refused, since its decay
                corresponds to no density.
            labels: name of the labels in dict batches; by default the first of ``labels``, ``label``, ``targets``,
                ``target`` and ``y`` that is there.

        Example:
            >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
            >>> target = Target.from_module(model, "gaussian", sampled="last_layer")
            >>> {name: tuple(x.shape) for name, x in target.initial().items()}
            {'2.weight': (1, 8), '2.bias': (1,), 'likelihood.scale': ()}
        """
        model = unwrapped(model)
        module = ModuleLikelihood(model, likelihood, sampled, autocast, channels_last, labels)
        given = {"prior": prior, "weight_decay": weight_decay, "optimizer": optimizer}
        if len(names := [name for name, value in given.items() if value is not None]) > 1:
            raise ValueError(f"{names[0]}= and {names[1]}= both say what the prior is: pass one of them")
        if optimizer is not None:
            prior = WeightDecay.of(optimizer, model, list(module.values))
        elif weight_decay is not None:
            prior = WeightDecay(weight_decay)
        prior = FanInNormal() if prior is None else as_prior(prior)
        for name in module.extra() | prior.extra(module.values):
            if name in module.values:
                raise ValueError(
                    f"the model has a parameter {name!r}, a name that is taken here; rename that submodule"
                )
        return cls(module, prior, num_data=num_data, init=module.values, predict=module.predict)

    def with_prior(self, prior: PriorLike, init: Mapping[str, Any]) -> Target:
        """The same log likelihood with another prior and other start values."""
        found = Target(
            self._log_likelihood, prior, num_data=self.num_data, positive=self._patterns, init=init,
            predict=self._predict,
        )  # fmt: skip
        return found.tempered(self._tempered)

    # ---------------------------------------------------------------- num_data and start values

    def resolve_num_data(self, data: Any) -> int:
        """N: the given one, else the length of the data. It is never guessed.

        Args:
            data: a tuple of tensors, or a loader whose data set has a length.
        """
        found = count_examples(data)
        if self.num_data is not None:
            return self.num_data  # the prior was made for it
        if found is None:
            raise ValueError(
                f"the number of examples is not known from data of type {type(data).__name__}; pass num_data= to Target"
            )
        if found < 1:
            raise ValueError("data has no examples")
        self.bind_num_data(found)
        return found

    def bind_num_data(self, num_data: int) -> None:
        """Set N in a prior that depends on it (`isosgd.priors.WeightDecay`)."""
        if num_data == self._prior_num_data:
            return
        self._prior_num_data = num_data
        if self._space is not None and self._prior.with_num_data(num_data) is not self._prior:
            values = self._space.values
            self._space = self._make_space({name: x for name, x in values.items() if name not in self._own})

    def initial(
        self,
        init: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Params:
        """Free parameters at the start of a chain: new leaf tensors that require gradients.

        Args:
            init: natural values; names left out start at the target's own values.
            device: of the parameters; their own by default.
            dtype: a floating-point type; their own by default.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype = {dtype}: parameters must be floating point")
        given = {name: as_parameter(name, value) for name, value in self.split_init(init)[0].items()}
        if not self._fixed:
            if not given:
                raise ValueError(
                    "the parameters are not known; pass init=, a dict of start values, to Target or sample"
                )
            self._space = self._make_space(given)
        assert self._space is not None
        return self._space.start(given, device, dtype)

    # ---------------------------------------------------------------- buffers of a module

    @property
    def module(self) -> ModuleLikelihood | None:
        """The module's likelihood, if the target was made from a module."""
        return self._log_likelihood if isinstance(self._log_likelihood, ModuleLikelihood) else None

    @property
    def buffers(self) -> Params:
        """Buffers of the module when the target was made; empty without a module."""
        return {} if self.module is None else self.module.buffers

    @property
    def frozen(self) -> Params:
        """Parameters of the module that are not sampled."""
        return {} if self.module is None else self.module.frozen

    @property
    def ties_examples(self) -> bool:
        """Whether the likelihood of an example depends on the rest of its minibatch (BatchNorm in training mode)."""
        return self.module is not None and self.module.ties_examples

    def split_init(self, init: Mapping[str, Any] | None) -> tuple[dict[str, Any], Params]:
        """Start values of parameters, and checked start values of buffers."""
        own, frozen = self.buffers, self.frozen
        init = self.without_aliases(init or {})
        params = {name: value for name, value in init.items() if name not in own and name not in frozen}
        for name, x in frozen.items():
            if name in init and not torch.equal(torch.as_tensor(init[name]).to(x), x):
                raise ValueError(f"init[{name!r}] is not sampled, and is not what the model has: leave it out")
        buffers = {name: torch.as_tensor(value) for name, value in init.items() if name in own}
        for name, value in buffers.items():
            if value.shape != own[name].shape:
                raise ValueError(
                    f"init[{name!r}] has shape {list(value.shape)}, but this buffer of the model has "
                    f"{list(own[name].shape)}: pass the state_dict of a network of the same architecture"
                )
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ValueError(f"init[{name!r}] has values that are NaN or infinite; mend them")
        return params, buffers

    def without_aliases(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Values by name; tied parameters once, under the name by which they are sampled."""
        aliases = {} if self.module is None else self.module.aliases
        for alias, name in aliases.items():
            if alias in state and name in state and not torch.equal(*map(torch.as_tensor, (state[alias], state[name]))):
                raise ValueError(f"{alias!r} and {name!r} are one parameter of the model, but have different values")
        return {name: x for name, x in state.items() if name not in aliases}

    def initial_buffers(self, init: Mapping[str, Any] | None, free: Params) -> Params:
        """Copies of the buffers at a chain's start, on the device and in the dtype of its parameters."""
        first = next(iter(free.values()))
        found = self.buffers | self.split_init(init)[1]
        return {
            name: x.detach().to(first.device, self.module.dtype_as(x, first.dtype), copy=True)
            for name, x in found.items()
            if self.module is not None
        }

    def of_likelihood(self, module: ModuleLikelihood) -> Target:
        """The same posterior with another implementation of the likelihood."""
        found = copy.copy(self)
        found._log_likelihood, found._predict, found._checked = module, module.predict, False
        return found

    def inputs_of(self, batch: Any) -> Any:
        """The inputs in a batch; without a module all but the last entry."""
        return inputs_of(batch, None if self.module is None else self.module.labels)

    def labels_of(self, batch: Any) -> Any:
        """The labels in a batch."""
        return labels_of(batch, None if self.module is None else self.module.labels)

    def check_device(self, device: torch.device) -> None:
        """Check that a device supports the target's mixed precision."""
        if self.module is not None:
            check_autocast(self.module.autocast, device)

    def using(self, buffers: Params) -> AbstractContextManager[None]:
        """Use these buffers, which forward passes may change, inside a ``with`` block."""
        return nullcontext() if self.module is None else self.module.using(buffers)

    @property
    def device(self) -> torch.device | None:
        """Device of the start values; None without start values."""
        return None if self._space is None else next(iter(self._space.values.values())).device

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the start values; None without start values."""
        return None if self._space is None else next(iter(self._space.values.values())).dtype

    def layers(self, free: Params) -> dict[str, str]:
        """Layer of each parameter: the module it sits in; sampled scales are layers of their own."""
        extras = self._bound(free).extras
        return {name: name if name in extras else layer_of(name) for name in free}

    def extras(self, free: Params) -> list[str]:
        """Names of the sampled parameters of the likelihood and the prior, such as scales."""
        return list(self._bound(free).extras)

    @property
    def layered(self) -> bool:
        """Whether it is `batched`, and gradients can come from `isosgd.native.layers`."""
        return self.batched and self.module is not None and self.module.layered

    def noise_scales(self) -> list[str]:
        """Names of the likelihood's parameters that are scales of the noise."""
        return [name for name, extra in self._own.items() if extra.noise_scale]

    def prior_scales(self, free: Params) -> list[str]:
        """Names of the sampled parameters of the prior."""
        return [name for name in self._bound(free).extras if name not in self._own]

    def prior_weight(self, free: Params, temperature: float) -> float:
        """Weight of the prior in the loss at temperature T, where ``exp(-N loss / T)`` is sampled.

        With fixed scales it is 1: prior and likelihood are tempered alike. It is T, so that the likelihood alone is
        tempered, if `tempered` says so or the prior has sampled scales: ``p(w | s)^(1/T)`` is not normalised in s, and
        its mass moves to s = 0 as T falls.
        """
        return temperature if self._whole_prior(free) else 1.0

    def _whole_prior(self, free: Params) -> str:
        """Why the prior is not tempered; empty if it is."""
        if self.prior_scales(free):
            return ", since the prior has scales that are sampled"
        return " (tempered='likelihood')" if self._tempered == "likelihood" else ""

    def tempered(self, what: Literal["both", "likelihood"]) -> Target:
        """The same target with a temperature that acts on ``both`` likelihood and prior, or on the ``likelihood``."""
        if what not in ("both", "likelihood"):
            raise ValueError(f"tempered = {what!r} is unknown; choose one of 'both', 'likelihood'")
        if what == self._tempered:
            return self
        found = copy.copy(self)
        found._tempered = what
        return found

    @property
    def prior_is_empirical(self) -> bool:
        """Whether the prior takes its scales from the start values."""
        return isinstance(self._prior, Empirical)

    def density(self, free: Params, temperature: float) -> str:
        """The density that is sampled at temperature T, as a formula and in words."""
        if temperature == 1:
            return "likelihood * prior: the posterior"
        if why := self._whole_prior(free):
            return f"likelihood^(1/T) * prior, T = {temperature:g}: the likelihood alone is tempered{why}"
        return f"(likelihood * prior)^(1/T), T = {temperature:g}: likelihood and prior are tempered alike"

    def _make_space(self, params: Params) -> Space:
        n = self._prior_num_data
        return Space(params, self._prior if n is None else self._prior.with_num_data(n), self._own, self._patterns)

    def _bound(self, params: Params) -> Space:
        """The space of parameters; a target without start values takes names and shapes from these."""
        if self._space is None:
            self._space = self._make_space(params)
        return self._space

    # ---------------------------------------------------------------- densities

    def constrain(self, free: Params) -> Params:
        """Natural parameters from free ones, which may have leading dimensions."""
        return self._bound(free).constrain(free)

    def unconstrain(self, natural: Params) -> Params:
        """Free parameters from natural ones, which may have leading dimensions."""
        return self._bound(natural).unconstrain(natural)

    def log_likelihood(self, free: Params, batch: Any) -> Tensor:
        """Log likelihood of each example, at free parameters."""
        if not self._checked:
            self.check(free, batch)
        return self._log_likelihood(self.constrain(free), batch)

    @property
    def checked(self) -> bool:
        """Whether a batch was checked, see `check`."""
        return self._checked

    def network(self) -> Network | None:
        """What the target's module is if it is a network of dense layers whose gradients are known; else None."""
        return None if self.module is None else self.module.network()

    @property
    def batched(self) -> bool:
        """Whether the module takes many chains in one pass, and the priors are those of independent entries."""
        return self.module is not None and self.module.batched and self.has_flat_prior

    @property
    def has_flat_prior(self) -> bool:
        """Whether the priors are those of independent entries, so that there is a `flat_prior`."""
        return self._space is not None and self._space.entries

    def log_likelihood_by_chain(self, free: Params, batch: Any) -> Tensor:
        """Log likelihoods ``[chains, n]`` of many chains, in one pass through a `batched` module."""
        assert self.module is not None
        return self.module.by_chain(self.constrain(free), batch)

    def slopes_by_chain(self, found: Tensor, own: Params, y: Tensor) -> tuple[Tensor, Tensor, Params]:
        """The same with derivatives, from the output of a module's layers and the likelihood's free parameters."""
        assert self.module is not None
        natural = self.constrain(own)
        each, slope, rest = self.module.slopes_by_chain(found, natural, y)
        positive = self._bound(own).positive  # chain rule
        return each, slope, {name: x * natural[name] if name in positive else x for name, x in rest.items()}

    def flat_prior(self, shapes: Mapping[str, tuple[int, ...]], like: Tensor) -> FlatPrior:
        """The log prior at flat parameters, where it `has_flat_prior`."""
        assert self._space is not None
        return FlatPrior(self._space, shapes, like)

    def log_prior(self, free: Params) -> Tensor:
        """Log density of the free parameters under the prior, including the Jacobian."""
        return self._bound(free).log_prior(free, self.constrain(free))

    def prior_score(self, free: Params) -> Params:
        """Gradient of the log prior of the free parameters, in closed form if there is one."""
        space = self._bound(free)
        return space.score(space.constrain(free))

    def gradient(
        self, free: Params, batch: Any, num_data: int, prior_weight: float = 1.0
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Gradients of the loss: mean negative log likelihood of the batch plus negative log prior over N.

        Args:
            free: free parameters that require gradients.
            batch: a minibatch.
            num_data: N.
            prior_weight: weight of the prior in the loss, see `prior_weight`; 0 leaves it out.

        Returns:
            The mean negative log likelihood, detached and without the prior's part, and the gradients of the whole
            loss, in the order of ``free``.
        """
        if not self._checked:
            self.check(free, batch)
        if self._prior_num_data is None:
            self.bind_num_data(num_data)
        space, leaves = self._bound(free), list(free.values())
        with torch.enable_grad():
            natural = space.constrain(free)
            mean = self._log_likelihood(natural, batch).mean()
            if mean.requires_grad:
                minus = torch.full_like(mean, -1)
                grads = torch.autograd.grad(mean, leaves, grad_outputs=minus, materialize_grads=True)
            else:
                grads = tuple(torch.zeros_like(x) for x in leaves)
        if not prior_weight:
            return mean.detach().neg(), grads
        with torch.no_grad():
            scores = space.score(natural)
            # Not in place: autograd may return one tensor for two parameters, or an expanded one.
            return mean.detach().neg(), list(
                torch._foreach_add(grads, [scores[name] for name in free], alpha=-prior_weight / num_data)
            )

    def prior_precisions(self, free: Params) -> list[float] | None:
        """Precision of each parameter's prior if all are flat or Gaussian with mean zero and fixed scale; else None."""
        space = self._bound(free)
        if space.positive:
            return None
        found: dict[str, float] = {}
        for part, names in space.prior.parts if isinstance(space.prior, Joint) else [(space.prior, tuple(free))]:
            if not isinstance(part, Normal | Flat):
                return None
            found |= {name: part.scale_of(name) ** -2 if isinstance(part, Normal) else 0.0 for name in names}
        return [found[name] for name in free]

    def prior_curvature(self, free: Params, batched: bool = False) -> list[Tensor]:
        """Second derivative of the negative log prior for each parameter (not divided by N), never negative.

        Exact for independent entries, also with a shared scale; else the sum of a row of the Hessian within a
        parameter. A prior without curvature (Laplace) or with a negative one (tails of a Student-t) gives the square of
        its slope, which has the same mean under the prior.

        Args:
            free: free parameters.
            batched: whether they have a leading dimension of chains.
        """
        leaves = {name: x.detach().requires_grad_() for name, x in free.items()}
        with torch.enable_grad():
            value = vmap(self.log_prior)(leaves).sum() if batched else self.log_prior(leaves)
            if not value.requires_grad:
                return [torch.zeros_like(x) for x in free.values()]
            slopes = torch.autograd.grad(value, list(leaves.values()), create_graph=True, materialize_grads=True)
            found = []
            for leaf, slope in zip(leaves.values(), slopes, strict=True):
                second = torch.zeros_like(leaf)  # derivative of the log prior
                if slope.requires_grad:
                    ones = torch.ones_like(leaf)
                    (second,) = torch.autograd.grad(slope, [leaf], ones, retain_graph=True, materialize_grads=True)
                found.append(torch.where(second < 0, -second, slope.square()).detach())
        return found

    def check(self, free: Params, batch: Any) -> None:
        """Check a batch: its form, its values, and what the log likelihood returns.

        The first batch is always checked. Call this before code that is compiled or mapped over chains. For a module
        the batch may be all data: all values are checked, and a few rows go through the module.
        """
        natural = self.constrain(free)
        with torch.no_grad():
            if self.module is not None:
                batch = self.module.check(natural, batch)
            value = self._log_likelihood(natural, batch)
        if self.module is not None and not self._checked:
            self._check_dependence(free, batch)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"log_likelihood must return a floating-point tensor [n], got {found}")
        length = batch_length(batch)
        if value.ndim != 1 or (length is not None and value.shape[0] != length):
            raise ValueError(
                f"log_likelihood must return one value for each example, shape [{'n' if length is None else length}], "
                f"got {list(value.shape)}; do not sum or average over examples"
            )
        if bad := int(value.isnan().sum()):
            raise ValueError(f"log_likelihood is NaN for {bad} of {len(value)} examples; look at the data and at init")
        self._checked = True

    def _check_dependence(self, free: Params, batch: Any) -> None:
        """Raise an error if a module's log likelihood has no gradient: draws would be from the prior."""
        with torch.enable_grad():
            leaves = {name: x.detach().requires_grad_() for name, x in free.items()}
            value = self._log_likelihood(self.constrain(leaves), batch)
            if isinstance(value, Tensor) and not value.requires_grad:
                raise ValueError(
                    "the log likelihood has no gradient in the sampled parameters: look for detach(), no_grad() or "
                    ".data in the model's forward(), or sample other parameters (sampled=)"
                )

    # ---------------------------------------------------------------- predictions

    @torch.no_grad()
    def predictive(self, free: Params, x: Any) -> Any:
        """Predictions at free parameters.

        Returns:
            For a module a dict of the ``mean`` and noise ``variance`` of y (the output under a callable likelihood);
            otherwise what the user's ``predict`` returns.
        """
        if self._predict is None:
            raise ValueError("this target cannot predict: pass predict=, a callable (params, x), to Target")
        return self._predict(self.constrain(free), x)

    @property
    def predicts(self) -> bool:
        """Whether it can predict."""
        return self._predict is not None

    def describe(self) -> dict[str, Any]:
        """Description of the target, as JSON values."""
        if self.module is not None:
            about = self.module.describe()
        else:
            name = getattr(self._log_likelihood, "__qualname__", "callable")
            about = {"likelihood": {"name": name, "callable": True}}
        space = self._space
        return about | {
            "prior": self._prior.describe(),
            **({} if self._tempered == "both" else {"tempered": self._tempered}),
            "num_data": self.num_data,
            "positive": list(space.positive if space else self._patterns),
            "parameters": {name: list(x.shape) for name, x in space.values.items()} if space else {},
        }
