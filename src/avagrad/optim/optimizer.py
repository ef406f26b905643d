"""The base class of all our optimizers: arguments, groups, states, ``step()``."""

import inspect
import itertools
import sys
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from avagrad.optim.arguments import ALLOWED, Allowed, callers_level, check_group_keys, check_values, plain_number
from avagrad.optim.backends import choose, fused
from avagrad.optim.checkpoint import load_state_dict
from avagrad.optim.in_backward import StepInBackward
from avagrad.optim.norm import Norm
from avagrad.optim.params import Group, Params, ParamView
from avagrad.optim.rounding import is_half, moment_dtype
from avagrad.optim.rules import Rule
from avagrad.optim.sharding import Sharding, local_part
from avagrad.optim.step import Step

__all__ = ["RuleOptimizer"]

_MAX_DECAY = 0.05  # fraction of a weight in one step; above it there is a warning


class RuleOptimizer(Optimizer):
    """A torch optimizer that runs a rule of :mod:`avagrad.optim.rules`.

    A subclass sets the rule (``_rule_class``) and the tensors of its state (``_state_tensors``). Besides torch's
    attributes there are three objects: the last snapshot of the parameters, the norm, and the context of
    ``step_in_backward()``. None of them is saved; all can be rebuilt from groups and state.
    """

    _rule_class: ClassVar[type[Rule]]
    _allowed: ClassVar[Allowed] = ALLOWED
    # A checkpoint whose groups lack one of these is from another optimizer, such as torch.optim.Adam.
    _own_keys: ClassVar[tuple[str, ...]] = ()
    _has_kernels: ClassVar[bool] = False  # else the loop takes all steps
    _needs_finite_state: ClassVar[bool] = False  # else a coordinate with an infinite second moment just does not move

    _lr_hint: ClassVar[str] = "Note that lr multiplies the decay"
    _has_warned_of_decay = False

    _params: Params | None = None
    _in_backward: StepInBackward | None = None

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        owner = type(self).__name__
        try:
            iter(params)
        except TypeError:
            given = f"a {type(params).__name__}" if isinstance(params, torch.nn.Module) else repr(params)
            must_be = "parameters or groups of them, such as model.parameters()"
            raise TypeError(f"{owner}: params is {given}, but must be {must_be}.") from None
        defaults = {key: plain_number(value) for key, value in defaults.items()}
        check_values(owner, defaults, self._allowed)
        self._norm = Norm()
        super().__init__(params, defaults)

    # --- what a subclass sets ---

    @abstractmethod
    def _state_tensors(self, group: Group) -> dict[str, bool]:
        """Name the tensors of a parameter's state besides ``step``: True for its shape, False for a scalar."""

    def _foreign_reason(self, group: Group) -> str | None:
        """Return why a saved group is from another optimizer; None if it is from this class."""
        missing = ", ".join(key for key in self._own_keys if key not in group)
        return f"its groups have no {missing}" if missing else None

    def _adopted(self, group: Group) -> Group:
        """Return the values of another optimizer's group that mean the same here."""
        return {}

    def _check(self, group: Group) -> None:
        """Reject values that one group may not have; unknown keys are the user's own."""
        check_values(type(self).__name__, {key: group[key] for key in self.defaults}, self._allowed)
        self._check_combination(group)

    def _check_combination(self, group: Group) -> None:
        """Reject options of one group that cannot be combined."""

    def _check_together(self, groups: Sequence[Group]) -> None:
        """Reject groups that cannot be combined."""

    def _sharding(self) -> Sharding | None:
        """Return how parameters are sharded over ranks that step together; None if they are not."""
        return None

    def _rules(self) -> list[Rule]:
        """Return the rules for the groups as they are now."""
        return [self._rule_class.of({key: group[key] for key in self.defaults}) for group in self.param_groups]

    def _warn_of_decay(self, rules: Sequence[Rule]) -> None:
        """Warn once if weight decay destroys the weights, as AdamW's value does at an lr a hundred times larger."""
        decay = max((rule.decay for rule in rules), default=0.0)
        if decay > _MAX_DECAY and not self._has_warned_of_decay:
            self._has_warned_of_decay = True
            warnings.warn(
                f"{type(self).__name__}: lr * weight_decay is {decay:g}, so that each step shrinks every weight by "
                f"{100 * decay:.3g} %. {self._lr_hint}.",
                stacklevel=callers_level(),
            )

    # --- groups ---

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, at any time; missing values are taken from the constructor."""
        owner = type(self).__name__
        if isinstance(param_group, dict):
            own = {key: plain_number(value) for key, value in param_group.items() if key in self.defaults}
            check_group_keys(owner, param_group, [*self.defaults, "params", "param_names"])
            self._check({**self.defaults, **own})
            self._check_together([*self.param_groups, {**self.defaults, **own}])
            if not isinstance(param_group.get("params"), (Tensor, set, type(None))):
                param_group["params"] = list(param_group["params"])
                _reject_duplicates(owner, param_group["params"])
            param_group.update(own)
        super().add_param_group(param_group)
        try:
            self._check_params(self.param_groups[-1])
            self._sharding()
        except ValueError:
            del self.param_groups[-1]
            raise
        self.refresh()
        if self._in_backward is not None:
            self._in_backward.watch(self.param_groups[-1]["params"])

    def _check_params(self, group: Group) -> None:
        """Reject parameters that cannot be optimized, or not with ``fused=True``."""
        owner = type(self).__name__
        for p in group["params"]:
            if p.is_complex():
                raise ValueError(
                    f"{owner}: a parameter of shape {tuple(p.shape)} is {p.dtype}, but must be real: make "
                    "torch.view_as_real(...) of it the parameter, and apply torch.view_as_complex where it is used."
                )
        if group["fused"]:
            reason = "this class has no fused implementation"
            if self._has_kernels:
                with torch.no_grad():
                    reason = fused.unsupported_reason([local_part(p) for p in group["params"]]) or ""
            if reason:
                raise ValueError(f"{owner}: fused is True, but {reason}. Leave fused out, or set it to False.")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves unscaling and skipping to ``step()``; read by torch.

        True with ``fused=True``, as in torch. Also if parameters are sharded, since no rank may skip the step alone
        because its gradients are not finite; and inside ``step_in_backward()``, so that a scaler can be rejected.
        """
        fused_here = self._has_kernels and any(group["fused"] for group in self.param_groups)
        return fused_here or self._in_backward is not None or self._sharding() is not None

    # --- states ---

    def _new_state(self, p: Tensor, group: Group, *, expanded: bool = False) -> dict[str, Tensor]:
        """Return the state of a parameter before its first gradient: ``step`` 0 means no estimate.

        With ``expanded`` it takes no memory, and can only be read.
        """
        dtype, lr = moment_dtype(p.dtype), group["lr"]
        # On the host unless something on a device needs it; made from a value, which tools with fake tensors read.
        on_device = group["capturable"] or (isinstance(lr, Tensor) and lr.device.type != "cpu")
        zero = torch.zeros((), dtype=dtype, device=p.device)
        state = {"step": zero.float() if on_device else torch.tensor(0.0, dtype=torch.float32, device="cpu")}
        for name, has_shape_of_p in self._state_tensors(group).items():
            if has_shape_of_p and not expanded:
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            else:
                state[name] = zero.expand(local_part(p).shape) if has_shape_of_p else zero.clone()
        return state

    def _make_states(self, rules: Sequence[Rule], *, in_backward: bool = False) -> None:
        """Make the states that a step needs, and convert existing ones to the layout that backends read.

        A parameter gets its state with its first gradient. When backward takes the step, it is not known which
        parameters will have one, so all that require a gradient get a state.
        """
        for group, rule in zip(self.param_groups, rules, strict=True):
            early = in_backward or rule.counts_from_start
            local = [local_part(p) for p in group["params"]]
            for_kernels = self._has_kernels and choose.wants_fused(group, local)
            for p in group["params"]:
                if not self.state.get(p):
                    if p.grad is None and not (early and p.requires_grad):
                        continue
                    self.state[p] = self._new_state(p, group)
                self._fit_state(p, group, for_kernels)

    def _fit_state(self, p: Tensor, group: Group, for_kernels: bool) -> None:
        state, keys = self.state[p], self._state_tensors(group)
        for key, has_shape_of_p in {"step": False, **keys}.items():
            if key not in state or (has_shape_of_p and state[key].shape != p.shape):
                found = "is missing"
                if key in state:
                    found = f"has the size {tuple(state[key].shape)}, but must have the same"
                raise RuntimeError(
                    f"{type(self).__name__}: the {key} of a parameter of size {tuple(p.shape)} {found}: give a changed "
                    "parameter or group a matching state, or delete the state."
                )
        if group.get("rounding") != "kahan" or not is_half(p.dtype):
            state.pop("compensation", None)  # an old rounding error must not be added later
        elif "compensation" not in state:
            state["compensation"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        for key in (*keys, "compensation"):  # in the same order on all ranks: a copy may be collective
            if key in state:  # the parameter's dtype may have changed
                state[key] = state[key].to(p.dtype if key == "compensation" else moment_dtype(p.dtype))
                if for_kernels:
                    state[key] = fused.laid_out_as(p, state[key])
        if for_kernels:
            state["step"] = state["step"].to(device=p.device, dtype=torch.float32)

    def _join(self, p: Tensor, rules: Sequence[Rule]) -> ParamView | None:
        """Return the view of a parameter that was added during a step, with a new state; None if it is not ours."""
        if not any(own is p for group in self.param_groups for own in group["params"]):
            return None
        self._make_states(rules)
        return next(view for view in Params(self, rules).views if view.param is p)

    def _current_params(self, rules: Sequence[Rule], *, in_backward: bool = False) -> Params:
        """Return a snapshot that matches. If a new one is needed, check everything and make missing states."""
        params = self._params
        if params is not None and params.matches(self, rules) and not params.lacks(in_backward=in_backward):
            return params
        for group in self.param_groups:
            self._check({**group, "lr": 0.0})  # which may be on a device
        self._check_together(self.param_groups)
        every = [p for group in self.param_groups for p in group["params"]]
        _reject_duplicates(type(self).__name__, every)
        self._reject_sparse([p.grad for p in every])
        if params is None or not params.same_params(self):
            self._norm.invalidate()
        with torch.inference_mode(mode=False):  # the tensors made here are also written to outside of it
            self._make_states(rules, in_backward=in_backward)
            self._params = Params(self, rules)
        return self._params

    def refresh(self) -> None:
        """Read the state again. Call this after writing in place to ``exp_avg_sq`` or ``step`` of a state.

        Sums over the state are cached from one step to the next, so such writes go unnoticed. A loaded state and
        changed groups are noticed without this, and so are new tensors in a state, except if parameters are sharded
        over ranks; then all ranks must call it. It also releases tensors that are no longer in the state.

        >>> from avagrad import AvaGrad
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> opt = AvaGrad([w], eps=1.0)
        >>> w.grad = torch.ones(3)
        >>> opt.step()  # gamma is 2 now
        >>> _ = opt.state[w]["exp_avg_sq"].mul_(4)
        >>> opt.refresh()
        >>> round(opt.gamma(), 6)
        3.0
        """
        self._params = None
        self._norm.invalidate()

    # --- a step ---

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch._disable_dynamo  # type: ignore[attr-defined]  # as in torch: nothing here can be compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. ``closure`` evaluates the model again and returns the loss."""
        self._reject_capture_of_host_scalars()
        if self._is_state_request():
            self._make_states(self._rules())
            return None
        if self._in_backward is not None and self._in_backward.close(closure):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with Step(self) as step:
            step.move()
        return loss

    def step_in_backward(self) -> StepInBackward:
        """Return a context in which ``backward()`` takes the step.

        Each parameter moves as soon as its gradient is complete, and the gradient is freed, so that gradients
        never exist all at once. The result is the ordinary step's, to the bit.

        Call ``step()`` after each ``backward()`` as usual: it ends the step, and schedulers and hooks rely on it.
        There are no gradients in between, so they cannot be clipped or accumulated; a GradScaler, a closure and a
        second ``backward()`` before ``step()`` are rejected. The context may enclose the whole training loop, or
        one ``backward()``. It must be entered by ``with``.

        >>> from avagrad import AvaGrad
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> opt = AvaGrad([w], lr=0.1)
        >>> with opt.step_in_backward():
        ...     for _ in range(3):
        ...         w.square().sum().backward()
        ...         opt.step()
        >>> w.grad, w.detach()
        (None, tensor([ 0.5199, -1.4965]))
        """
        context = StepInBackward(self)
        if self._in_backward is None:
            self._in_backward = context  # so that step() can detect that it was not entered
        return context

    def _is_state_request(self) -> bool:
        """Return whether this step only makes torch.distributed.checkpoint's initial state.

        It calls ``step()`` with zero gradients and an lr of 0, on ranks that have no state. It gets zeros with ``step``
        0, and nothing else happens. A warm-up from 0 begins in the same way, so the caller is looked up in the stack.
        """
        rates = [group["lr"] for group in self.param_groups]
        if any(self.state.values()) or any((isinstance(lr, Tensor) and not lr.is_cpu) or lr != 0 for lr in rates):
            return False
        callers = itertools.islice(traceback.walk_stack(sys._getframe(1)), 40)
        names = [(frame.f_code.co_name, frame.f_globals.get("__name__")) for frame, _ in callers]
        return ("_init_optim_state", "torch.distributed.checkpoint.state_dict") in names

    def _reject_sparse(self, grads: Sequence[Tensor | None]) -> None:
        for g in grads:
            if g is not None and g.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__}: a gradient has the layout {g.layout}, but must be dense: the "
                    "moments need every coordinate. Use sparse=False in the embedding, or give this parameter to "
                    "torch.optim.SparseAdam."
                )

    def _reject_capture_of_host_scalars(self) -> None:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing and not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}: capturable is False, but step() is being captured in a CUDA graph, which "
                "would freeze lr and step: construct the optimizer with capturable=True."
            )

    # --- checkpoints ---

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_norm", Norm())  # a copy has none
        self.refresh()
        self.defaults.pop("differentiable", None)  # torch adds it, and its checkpoints compare the keys of groups
        for name, parameter in inspect.signature(type(self)).parameters.items():  # older pickles lack some
            if name in self._allowed and parameter.default is not parameter.empty:
                self.defaults.setdefault(name, parameter.default)
        for group in self.param_groups:
            group.pop("differentiable", None)
            group.update({**self.defaults, **group})

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, to the bit; nothing is shared with ``state_dict`` afterwards.

        From another optimizer with the same tensors (``torch.optim.Adam``) moments and step counts are loaded, and the
        hyper-parameters that mean the same (Adam's in AvaStep); all others are kept, with a warning. A state that does
        not fit is rejected, and nothing changes.
        """
        load_state_dict(self, state_dict, super().load_state_dict)


def _reject_duplicates(owner: str, params: Sequence[Any]) -> None:
    seen: set[int] = set()
    for p in params:
        p = p[1] if isinstance(p, tuple) else p  # named
        if id(p) in seen:
            raise ValueError(
                f"{owner}: a parameter of shape {tuple(p.shape)} appears twice, but must appear once: a step would "
                "move it twice."
            )
        seen.add(id(p))
