"""What all our optimizers share: groups, state, checkpoints, and the frame of a step."""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict, _use_grad_for_differentiable

from avagrad.optim.arguments import check_group_keys, check_values, plain_number
from avagrad.optim.entries import Batch, Entry, Group, as_real, count, host_or_device, moment_dtype, scalar_dtype
from avagrad.optim.in_backward import StepInBackward
from avagrad.optim.rounding import is_half
from avagrad.optim.sharding import bump_versions, is_asked_for_state, is_dtensor, local_part

__all__ = ["RuleOptimizer"]

_STEP_DTYPE = torch.float32  # as torch's: counts exactly up to 16 million steps


class RuleOptimizer(Optimizer):
    """A torch optimizer that runs functions of :mod:`avagrad.optim.rules`.

    A subclass says which tensors its state holds (``_state_tensors``) and moves the parameters
    (``_update``); arguments, groups, checkpoints and torch's conventions are looked after here.
    """

    # A checkpoint whose groups lack one of these is another optimizer's (torch.optim.Adam's, say).
    _own_keys: ClassVar[tuple[str, ...]] = ()
    _in_backward: StepInBackward | None = None
    _step_supports_amp_scaling: bool = False  # a GradScaler asks

    def _foreign(self, group: Group) -> str | None:
        """Say why a saved group is another optimizer's; None if it is ours."""
        missing = [key for key in self._own_keys if key not in group]
        return f"its groups have no {', '.join(missing)}" if missing else None

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        defaults = {key: plain_number(value) for key, value in defaults.items()}
        check_values(type(self).__name__, defaults)
        self._compiled_numbers: list[Group] = []
        super().__init__(params, defaults)

    # --- groups ---

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, at any time; what it leaves out is taken from the constructor."""
        if isinstance(param_group, dict):
            own = {key: plain_number(value) for key, value in param_group.items() if key in self.defaults}
            check_group_keys(type(self).__name__, param_group, [*self.defaults, "params", "param_names"])
            self._check({**self.defaults, **own})
            self._check_together([*self.param_groups, {**self.defaults, **own}])
            param_group.update(own)
        super().add_param_group(param_group)
        try:
            self._check_fused(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise
        if self._in_backward is not None:
            self._in_backward.watch(self.param_groups[-1]["params"])

    def _check(self, group: Group) -> None:
        """Refuse values that one group may not have; keys that are not ours are the user's."""
        check_values(type(self).__name__, {key: group[key] for key in self.defaults})

    def _check_together(self, groups: list[Group]) -> None:
        """Refuse groups that do not go together."""

    def _check_fused(self, group: Group) -> None:
        """Refuse ``fused=True`` where there is no kernel for it."""
        if group["fused"] and (reason := self._reason_against_fused(group)):
            raise ValueError(
                f"{type(self).__name__}: fused is True, but {reason}. Leave fused out, or set it to False."
            )

    def _reason_against_fused(self, group: Group) -> str | None:
        """Say why a group cannot be stepped by a fused kernel; None if it can."""
        return "this class has no fused implementation"

    def _fused_step(self, *, is_compiling: bool) -> bool:
        """Take the step with a fused kernel; False if that cannot be, and nothing has been done."""
        return False

    # --- state ---

    @abstractmethod
    def _state_tensors(self, group: Group) -> dict[str, bool]:
        """Name the tensors of a parameter's state beside ``step``: True for its shape, False for a scalar."""

    @abstractmethod
    def _update(self, batches: list[Batch]) -> None:
        """Move every parameter that has a gradient, and count it in its ``step``."""

    def _new_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the state of a parameter before its first gradient: ``step`` 0 means no estimate."""
        dtype = moment_dtype(p.dtype)
        # On the host unless something that it meets there would have to be waited for.
        on_device = group["capturable"] or (isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu")
        if on_device:
            state = {"step": torch.zeros((), dtype=_STEP_DTYPE, device=p.device)}
        else:  # from a value, so that fake tensors know it: tools that run steps on them read it
            state = {"step": torch.tensor(0.0, dtype=_STEP_DTYPE, device="cpu")}
        for name, has_shape_of_p in self._state_tensors(group).items():
            state[name] = (
                torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                if has_shape_of_p
                else torch.zeros((), dtype=dtype.to_real(), device=p.device)
            )
        return state

    def _init_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor | None],
        steps: list[Tensor],
        tensors: list[Tensor],
        rests: list[Tensor | None],
        places: list[int],
    ) -> None:
        """Collect the parameters of a group that have a gradient or a state, making state where it is missing.

        ``tensors`` gets the state of one parameter after the other, ``rests`` what rounding has cut off.
        torch.compile knows this method by its name and runs it when it traces, instead of tracing it: hence
        flat lists, and nothing is returned.
        """
        names = list(self._state_tensors(group))
        for place, p in enumerate(group["params"]):
            if p.grad is None and not self.state.get(p):
                continue
            state = self.state[p]
            if not state:
                state.update(self._new_state(p, group))
            params.append(p)
            grads.append(p.grad)
            steps.append(state["step"])
            tensors.extend(state[name] for name in names)
            if group.get("rounding") != "kahan" or not is_half(p.dtype.to_real()):
                state.pop("compensation", None)  # what was cut off then is not to be added one day
            elif "compensation" not in state:
                state["compensation"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            rests.append(state.get("compensation"))
            places.append(place)

    # --- the frame of a step ---

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        self._refuse_capture_of_host_scalars()
        if self._in_backward is not None and self._in_backward.close(closure):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if self._fused_step(is_compiling=torch.compiler.is_compiling()):
            return loss
        self._refuse_what_cannot_be_stepped()
        counts = self._counts_as_a_step()
        known = self._known_numbers(as_tensors=torch.compiler.is_compiling())
        batches, place = [], 0
        for group, numbers in zip(self.param_groups, known, strict=True):
            batches.append(self._batch(group, numbers, place))
            place += len(group["params"])
        self._update_if(counts, batches)
        if counts is not False:
            self._start_next_sums()
        bump_versions(self.param_groups)
        return loss

    def _steps_together(self) -> bool:
        """Tell whether ranks step together, so that no rank may see a question where others see a step."""
        return False

    def _take_part(self, batches: list[Batch]) -> None:
        """Do what all ranks do together in a step, also where this one has nothing to update."""

    def _start_next_sums(self) -> None:
        """Start what the ranks have to add up for the next step."""

    def _batch(self, group: Group, numbers: Group, place: int) -> Batch:
        """Return a group as a step sees it, making state where it is missing; its first parameter has this place."""
        params: list[Tensor] = []
        grads: list[Tensor | None] = []
        steps: list[Tensor] = []
        tensors: list[Tensor] = []
        rests: list[Tensor | None] = []
        places: list[int] = []
        self._init_group(group, params, grads, steps, tensors, rests, places)
        size = len(tensors) // max(len(params), 1)
        entries = [
            Entry(
                p,
                as_real(local_part(p)),
                None if g is None else as_real(self._unscaled(local_part(g, like=p)).resolve_conj()),
                steps[i],
                host_or_device(steps[i], group),
                [as_real(local_part(x)) for x in tensors[i * size : (i + 1) * size]],
                place + places[i],
                None if (rest := rests[i]) is None else as_real(local_part(rest)),
            )
            for i, (p, g) in enumerate(zip(params, grads, strict=True))
        ]
        own = {key: group[key] for key in self.defaults}
        return Batch(own | numbers, entries, numbers["unseen"])

    def _update_if(self, counts: bool | Tensor, batches: list[Batch]) -> None:
        """Update; or leave all as it is, on the device's word if need be."""
        if counts is False:
            return
        tensors = [x for batch in batches for entry in batch.entries for x in entry.written()]
        before = [x.clone() for x in tensors] if isinstance(counts, Tensor) else []
        self._update(batches)
        for x, old in zip(tensors, before, strict=False):
            assert isinstance(counts, Tensor)
            x.copy_(torch.where(counts.to(x.device), x, old))

    # --- stepping inside backward ---

    def step_in_backward(self) -> StepInBackward:
        """Return a context in which ``backward()`` takes the step.

        Each parameter moves as soon as its gradient is complete, and the gradient is freed, so that gradients
        never exist all at once. The result is the ordinary step's, to the bit.

        ``step()`` is still called after each ``backward()``: it closes the step, and schedulers and hooks know
        it. There are no gradients to look at in between, so they cannot be clipped or accumulated; a GradScaler,
        a closure and a second ``backward()`` before ``step()`` are refused. The context may hold the whole
        training loop, or one ``backward()``.

        >>> from avagrad import AvaGrad
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> opt = AvaGrad([w], lr=0.1)
        >>> with opt.step_in_backward():
        ...     for _ in range(3):
        ...         w.square().sum().backward()
        ...         opt.step()
        >>> w.grad is None
        True
        >>> w
        Parameter containing:
        tensor([ 0.5199, -1.4965], requires_grad=True)
        """
        return StepInBackward(self)

    def _tell_scalers(self) -> None:
        """Say whether a GradScaler is to leave unscaling and skipping to the step.

        Inside of backward it is to ask, so that it can be refused; else it would complain of finding no gradients.
        """
        self._step_supports_amp_scaling = self._in_backward is not None

    def _begin_step(self) -> None:
        """Settle all that the parameters of a step share, before the first of them moves."""
        self._refuse_capture_of_host_scalars()
        self._check_together(self.param_groups)
        self._begun_counts = self._has_an_lr()

    def _move_one(self, p: Tensor) -> None:
        """Move a parameter by its gradient, in a step that has begun; do nothing if it is not one of ours."""
        self._refuse_sparse(p)
        place = 0
        for group in self.param_groups:
            for nth, own in enumerate(group["params"]):
                if own is p:
                    batch = self._batch({**group, "params": [p]}, {"unseen": 0}, place + nth)
                    self._update_if(self._begun_counts, [batch])
                    return
            place += len(group["params"])

    def _end_step(self) -> None:
        """End a step that has begun."""

    @torch._disable_dynamo  # type: ignore[attr-defined]  # not traced: the answer changes after the first step
    def _counts_as_a_step(self) -> bool | Tensor:
        """Tell a step from a question: as a tensor where only the device knows the answer.

        torch.distributed.checkpoint asks a fresh optimizer for its state by a step with lr 0. It gets
        state that has seen nothing, and what follows is not changed by the question.
        """
        counts = self._has_an_lr()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None or counts is False:
            return counts
        finite = found_inf == 0  # a GradScaler leaves it to the optimizer to skip the step
        return finite if counts is True else finite & counts.to(finite.device)

    def _has_an_lr(self) -> bool | Tensor:
        """Tell whether there is a state, or an lr other than 0."""
        lrs = [group["lr"] for group in self.param_groups]
        if any(self.state.values()) or any(lr != 0 for lr in lrs if not isinstance(lr, Tensor)):
            return True
        if self._steps_together():
            return not is_asked_for_state()
        tensors = [lr.detach().reshape(()) for lr in lrs if isinstance(lr, Tensor)]
        if not tensors:
            return False
        any_lr = torch.stack([lr.to(tensors[0].device) for lr in tensors]).ne(0).any()
        return bool(any_lr) if any_lr.device.type == "cpu" else any_lr

    @torch._disable_dynamo  # type: ignore[attr-defined]  # not traced: reads what a compiled step cannot watch
    def _known_numbers(self, as_tensors: bool) -> list[Group]:
        """Return for each group ``unseen``, and for a compiled step its numbers as tensors, refilled in place.

        A number that a scheduler changes would be compiled in, and lead to a recompilation or worse.
        """
        unseen = [
            sum(count(p) for p in group["params"] if p.requires_grad and p.grad is None and not self.state.get(p))
            for group in self.param_groups
        ]
        if not as_tensors:
            return [{"unseen": n} for n in unseen]
        self._compiled_numbers += [{} for _ in self.param_groups[len(self._compiled_numbers) :]]
        for group, n, kept in zip(self.param_groups, unseen, self._compiled_numbers, strict=False):
            device = next((p.device for p in group["params"]), torch.device("cpu"))
            numbers = {key: group[key] for key in self.defaults} | {"unseen": float(n)}
            for key, value in numbers.items():
                if key == "betas":
                    old = kept.get(key, (None, None))
                    kept[key] = tuple(_refilled(x, beta, device) for x, beta in zip(old, value, strict=True))
                elif isinstance(value, float) and (value != 0 or key == "unseen"):  # 0 switches weight decay off
                    kept[key] = _refilled(kept.get(key), value, device)
                else:
                    kept.pop(key, None)
        return self._compiled_numbers[: len(self.param_groups)]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # not traced: nothing to compile
    def _refuse_what_cannot_be_stepped(self) -> None:
        """Raise before anything has been changed."""
        self._look_again()
        self._check_together(self.param_groups)
        for p in (p for group in self.param_groups for p in group["params"]):
            self._refuse_sparse(p)

    def _look_again(self) -> None:
        """See whether the parameters are still those that were looked at."""

    def _refuse_sparse(self, p: Tensor) -> None:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__}: a gradient has the layout {p.grad.layout}, but must be dense: the "
                "moments need every coordinate. Use sparse=False in the embedding, or give this parameter to "
                "torch.optim.SparseAdam."
            )

    def _unscaled(self, g: Tensor) -> Tensor:
        """Undo a GradScaler's scale, where it leaves that to the optimizer."""
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is None:
            return g
        wide = g.to(moment_dtype(g.dtype))  # in float16 the quotient may be 0
        return wide / grad_scale.to(g.device)  # type: ignore[no-any-return]

    def _refuse_capture_of_host_scalars(self) -> None:
        if torch.compiler.is_compiling() or not torch.cuda.is_available():
            return
        if torch.cuda.is_current_stream_capturing() and not all(g["capturable"] for g in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__}: capturable is False, but step() is being captured in a CUDA graph, which "
                "would freeze lr and step: construct the optimizer with capturable=True."
            )

    # --- checkpoints ---

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compiled_numbers = []
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, to the bit; nothing is shared with ``state_dict`` afterwards.

        The state of another optimizer that has the same tensors (``torch.optim.Adam``) can be loaded
        too: moments and step counts are taken, hyper-parameters stay what they are.
        """
        if self._in_backward is not None:
            self._in_backward.end()  # what backward has begun is over
        given: StateDict = {}
        reasons = [reason for group in state_dict["param_groups"] if (reason := self._foreign(group))]
        if reasons:
            warnings.warn(
                f"{type(self).__name__}: the loaded state is another optimizer's ({reasons[0]}). Its moments and step "
                "counts are taken; lr, eps and all other hyper-parameters stay as they are.",
                stacklevel=2,
            )

        def adapt(_: Optimizer, loaded: StateDict) -> StateDict:
            given.update(self._fitting(loaded))
            return given

        def take_again(_: Optimizer) -> None:
            """Take the values again: by now torch has cast every moment to its parameter's dtype."""
            for saved_id, p, group in self._matched(given):
                for key, value in given["state"].get(saved_id, {}).items():
                    if is_dtensor(p) and not is_dtensor(value) and value.shape == p.shape and key != "step":
                        value = _spread(value, p)
                    if key == "step":
                        device = p.device if group["capturable"] else torch.device("cpu")
                        self.state[p][key] = value.to(device=device, dtype=_STEP_DTYPE, copy=True)
                    elif key in self._state_tensors(group):
                        dtype = moment_dtype(p.dtype)
                        dtype = dtype if value.is_complex() else dtype.to_real()
                        self.state[p][key] = value.to(device=p.device, dtype=dtype, copy=True)
                    elif key == "compensation":
                        self.state[p][key] = value.to(device=p.device, dtype=p.dtype, copy=True)

        # After the user's own hooks have made of the state what they like, and before they see the result.
        handles = (
            self.register_load_state_dict_pre_hook(adapt),
            self.register_load_state_dict_post_hook(take_again, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _fitting(self, loaded: StateDict) -> StateDict:
        """Return ``loaded`` with our hyper-parameters where it has none, or refuse what does not fit."""
        owner = type(self).__name__
        groups = loaded["param_groups"]
        foreign = any(self._foreign(group) for group in groups)
        if foreign:
            # Groups that do not match in number are torch's to refuse.
            pairs = zip(self.param_groups, groups, strict=False)
            groups = [{**own, "params": saved["params"]} for own, saved in pairs] + groups[len(self.param_groups) :]
        groups = [{**self.defaults, **group} for group in groups]
        for own, group in zip(self.param_groups, groups, strict=False):
            self._check(group)
            self._check_fused({**group, "params": own["params"]})
        self._check_together(groups)
        fitting = {**loaded, "param_groups": groups, "state": dict(loaded["state"])}
        for saved_id, p, group in self._matched(fitting):
            values = loaded["state"].get(saved_id)
            if not values:
                continue
            wanted = self._state_tensors(group)
            lacking = [key for key in ("step", *wanted) if key not in values]
            if lacking:
                raise ValueError(
                    f"{owner}: the loaded state of a parameter of shape {tuple(p.shape)} has no {', '.join(lacking)}, "
                    f"but must have {', '.join(('step', *wanted))}."
                )
            for key in ("step", *wanted, "compensation"):
                shape = p.shape if wanted.get(key, key == "compensation") else torch.Size()
                if isinstance(values.get(key), Tensor) and values[key].shape != shape:
                    raise ValueError(
                        f"{owner}: the loaded {key} has the shape {tuple(values[key].shape)}, but must have "
                        f"{tuple(shape)}, for a parameter of shape {tuple(p.shape)}."
                    )
            values = {key: values[key] for key in ("step", *wanted)} if foreign else dict(values)
            if not isinstance(values["step"], Tensor):
                values["step"] = torch.tensor(float(values["step"]), dtype=_STEP_DTYPE)
            fitting["state"][saved_id] = values
        return fitting

    def _matched(self, state_dict: StateDict) -> list[tuple[Any, Tensor, Group]]:
        """Return (saved id, parameter, group) for each parameter, in order."""
        return [
            (saved_id, p, {**own, **saved})
            for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False)
            for p, saved_id in zip(own["params"], saved["params"], strict=False)
        ]


def _spread(whole: Tensor, p: Tensor) -> Tensor:
    """Return a whole tensor, which every rank has, spread over the mesh of a parameter."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]


def _refilled(old: Tensor | None, value: float, device: torch.device) -> Tensor:
    """Return a 0-dimensional tensor that holds ``value``: the old one, if it is on the right device."""
    if old is None or old.device != device:
        return torch.full((), value, dtype=scalar_dtype(device), device=device)
    return old.fill_(value)
