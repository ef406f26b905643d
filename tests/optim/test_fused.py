"""The fused paths beyond parity, native and Triton's: layouts, scalers, resumes, changes in mid-run."""

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import (
    DELAYED,
    FUSED,
    FUSED_PATHS,
    gradients,
    is_fused,
    laid_out_as,
    optimizer_class,
    parameters,
    take_fused_path,
)
from torch import Tensor

from avagrad import AvaGrad
from avagrad.optim.backends import fused as fused_backend
from avagrad.optim.backends.loop import Loop

NAN, INF = float("nan"), float("inf")
HERE = "cpu"


@pytest.fixture(autouse=True, params=FUSED_PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys.modules[__name__], "HERE", take_fused_path(request.param, monkeypatch))
    return str(request.param)


def on_device(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(HERE)) for p in params]


def step_with(opt: Any, params: list[torch.nn.Parameter], grads: list[Tensor | None]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = laid_out_as(p, g)
    opt.step()


def both(name: str, shapes: list[tuple[int, ...]], **options: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    """Return a fused optimizer and one of the loop, with the same parameters."""
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=rng) for shape in shapes]
    one, two = ([torch.nn.Parameter(x.to(HERE, copy=True)) for x in values] for _ in range(2))
    make = optimizer_class(name)
    return make(one, **options, **FUSED), make(two, foreach=False, **options), one, two


def random_gradients(params: list[torch.nn.Parameter], t: int) -> list[Tensor | None]:
    rng = torch.Generator().manual_seed(100 + t)
    return [torch.randn(p.shape, generator=rng) for p in params]


def assert_same(one: list[Any], two: list[Any]) -> None:
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=3e-6, atol=3e-6, equal_nan=True)


@pytest.mark.parametrize("active_only", [False, True])
def test_sizes_around_a_block(active_only: bool, path: str) -> None:
    n = fused_backend.BLOCK if path == "triton" else fused_backend.CPU_BLOCK
    shapes: list[tuple[int, ...]] = [(n - 1,), (n,), (n + 1,), (3, n), (1,), (), (0,), (2 * n + 17,)]
    fused, loop, one, two = both("AvaGrad", shapes, weight_decay=0.1, active_only=active_only)
    for t in range(4):
        grads = random_gradients(one, t)
        step_with(fused, one, grads)
        step_with(loop, two, grads)
    assert is_fused(fused)
    assert_same(one, two)


def test_misaligned_tensors() -> None:
    """Views that begin in the middle of 16 bytes, of parameters and of gradients."""
    fused, loop, one, two = both("AvaGradW", [(fused_backend.BLOCK + 3,), (5000,)], weight_decay=0.1)
    for opt, params in ((fused, one), (loop, two)):
        for i, p in enumerate(params):
            p.data = torch.cat([torch.zeros(i + 1, device=HERE), p.detach()])[i + 1 :]
        for t in range(4):
            for p, g in zip(params, random_gradients(params, t), strict=True):
                assert g is not None
                p.grad = torch.cat([torch.zeros(3), g]).to(HERE)[3:]
            opt.step()
    assert is_fused(fused)
    assert one[0].data_ptr() % 16
    assert_same(one, two)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_infinite_and_nan_gradients_do_what_they_do_in_the_loop() -> None:
    fused, loop, one, two = both("AvaGrad", [(4,), (3,)])
    for t, bad in enumerate([1.0, 1.0, INF, 1.0, NAN, 1.0]):
        grads = random_gradients(one, t)
        assert grads[0] is not None
        grads[0][1] = bad
        step_with(fused, one, grads)
        step_with(loop, two, grads)
        assert_same(one, two)


def test_events_in_mid_run() -> None:
    """Everything that makes the kept sum or the tables stale; each is followed by steps that would show it."""
    fused, loop, one, two = both("AvaGrad", [(6,), (7,), (5,)], eps=0.1, bias_correction=False, weight_decay=0.1)
    late = [torch.nn.Parameter(torch.ones(4, device=HERE)) for _ in range(2)]
    for t in range(30):
        for opt, params in ((fused, one), (loop, two)):
            group = opt.param_groups[0]
            if t == 4:
                group["lr"] = 0.05
            elif t == 6:
                group["eps"] = 0.3
            elif t == 8:
                group["betas"] = (0.8, 0.9)
            elif t == 10:
                group["bias_correction"] = True
            elif t == 12:
                group["active_only"] = True
            elif t == 14:
                group["norm"] = 1
            elif t == 16:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            elif t == 18:
                opt.add_param_group({"params": [late[0 if params is one else 1]], "eps": 0.7, "norm": 1})
                params.append(late[0 if params is one else 1])
            elif t == 20:
                opt.state[params[0]]["exp_avg_sq"] = 4 * opt.state[params[0]]["exp_avg_sq"]
            elif t == 22:
                group["weight_decay"] = 0.0
            elif t == 24:
                params[1].data = params[1].detach().clone()
            elif t == 26:
                group["maximize"] = True
            grads = random_gradients(params, t)
            if t < 3 or t % 5 == 0:
                grads[2] = None  # joins late, and is absent now and then
            if t % 7 == 3:
                params[2].requires_grad_(not params[2].requires_grad)
            step_with(opt, params, grads)
        assert_same(one, two)
    assert is_fused(fused)


def test_parameters_and_states_that_are_replaced_by_hand() -> None:
    """As those do who prune or grow a model: a new parameter, with a part of the old one's state."""
    fused, loop, one, two = both("AvaGrad", [(6, 3), (4,)], eps=0.01)
    for t in range(12):
        for opt, params in ((fused, one), (loop, two)):
            if t == 4:
                state = opt.state.pop(params[0])
                params[0] = torch.nn.Parameter(params[0].detach()[:5].clone())
                opt.param_groups[0]["params"][0] = params[0]
                opt.state[params[0]] = {key: x[:5].clone() if x.dim() else x for key, x in state.items()}
            elif t == 6:
                opt.state[params[1]]["exp_avg"] = torch.zeros_like(params[1])
            elif t == 8:
                opt.state[params[1]]["step"] = torch.tensor(3.0)
            elif t == 10:
                opt.state.clear()
            step_with(opt, params, random_gradients(params, t))
        assert_same(one, two)
    assert is_fused(fused)


def warm(n: int = 3, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Return a fused optimizer with a plan, one of the loop, and their parameters."""
    fused, loop, one, two = both("AvaGrad", [(4, 4), (5,)], eps=0.01, **options)
    for t in range(n):
        for opt, params in ((fused, one), (loop, two)):
            step_with(opt, params, random_gradients(params, t))
    assert is_fused(fused)
    return fused, loop, one, two


def give_other_memory(x: Tensor) -> Tensor:
    x.data = x.data.clone()
    return x


REPLACEMENTS: dict[str, Any] = {
    "other memory for the moments": lambda opt, p: [
        give_other_memory(opt.state[p][k]) for k in ("exp_avg", "exp_avg_sq")
    ],
    "another state": lambda opt, p: opt.state.update({p: {}}),
    "zeros for a state": lambda opt, p: opt.state.update(
        {p: {k: torch.zeros_like(x) for k, x in opt.state[p].items()}}
    ),
    "a transposed parameter": lambda opt, p: setattr(p, "data", p.data.t()) if p.dim() == 2 else None,
    "other memory for the parameter": lambda opt, p: setattr(p, "data", p.data.clone()),
    "a swapped parameter": lambda opt, p: torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
        p, torch.nn.Parameter(p.detach() * 2)
    ),
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_what_is_replaced_behind_the_tables(what: str) -> None:
    fused, loop, one, two = warm()
    for opt, params in ((fused, one), (loop, two)):
        for p in params:
            REPLACEMENTS[what](opt, p)
    assert fused.gamma() == pytest.approx(loop.gamma(), rel=1e-5)
    for opt, params in ((fused, one), (loop, two)):
        for t in range(3, 7):
            step_with(opt, params, random_gradients(params, t))
    assert_same(one, two)
    for p, q in zip(one, two, strict=True):
        assert torch.equal(fused.state[p]["step"].cpu(), loop.state[q]["step"].cpu())
        torch.testing.assert_close(fused.state[p]["exp_avg_sq"], loop.state[q]["exp_avg_sq"], rtol=3e-6, atol=1e-7)


CHANGED: dict[str, Any] = {
    "transposed": lambda g: g.t(),
    "expanded": lambda g: g[:1].expand_as(g),
    "negative": lambda g: torch._neg_view(g),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_gradient_at_the_same_address_with_another_layout(what: str) -> None:
    fused, loop, one, two = warm()
    for opt, params in ((fused, one), (loop, two)):
        for p in params:
            p.grad = CHANGED[what](p.grad) if p.dim() == 2 else p.grad
        opt.step()
    assert_same(one, two)


@pytest.mark.parametrize("data", [lambda w: w[:2], lambda w: torch.cat([w, w])], ids=["shrunk", "grown"])
def test_a_parameter_that_its_state_does_not_fit_is_rejected(data: Any) -> None:
    fused, _, one, _ = warm()
    whole = one[1].data
    kept = whole.clone()
    one[1].data = data(whole)
    for p in one:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="size"):
        fused.step()
    assert torch.equal(whole, kept)


def test_autograd_knows_that_the_parameters_have_been_written_to() -> None:
    fused, _, one, _ = warm()
    loss = sum(p.square().sum() for p in one)
    loss.backward(retain_graph=True)
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_frozen_parameter_without_bias_correction() -> None:
    """With a state that has seen nothing it does not count in the norm, and a thawed one does."""
    fused, loop, one, two = both("AvaGrad", [(6,), (3,)], eps=0.01, bias_correction=False)
    for opt, params in ((fused, one), (loop, two)):
        opt.param_groups[0]["lr"] = 0.0
        step_with(opt, params, random_gradients(params, 0))  # a question: state with step 0
        opt.param_groups[0]["lr"] = 0.1
        for t in range(1, 9):
            params[1].requires_grad_(t not in (3, 4, 5))
            step_with(opt, params, [random_gradients(params, t)[0], None])
    assert is_fused(fused)
    assert_same(one, two)


def test_checks_that_a_plan_does_not_switch_off() -> None:
    fused, _, one, _ = warm()
    fused.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=HERE))]})
    fused.param_groups[1]["norm"] = 1
    with pytest.raises(ValueError, match="norm is 2 in one group and 1 in another"):
        fused.step()
    fused.param_groups[1]["norm"] = 2
    one[1].grad = torch.ones(5, device=HERE).to_sparse()
    with pytest.raises(RuntimeError, match="must be dense"):
        fused.step()


def test_small_half_precision_gradients_survive_the_scaler_in_the_first_step() -> None:
    w = torch.nn.Parameter(torch.ones(4, device=HERE, dtype=torch.float16))
    opt = AvaGrad([w], fused=True)
    opt.grad_scale, opt.found_inf = (torch.tensor(x, device=HERE) for x in (65536.0, 0.0))  # type: ignore[attr-defined]
    w.grad = torch.full_like(w, 1e-3)
    opt.step()
    assert (opt.state[w]["exp_avg_sq"] > 0).all()


def test_the_stride_of_a_single_element_means_nothing() -> None:
    w = torch.nn.Parameter(torch.ones(1, 5, device=HERE))
    opt = AvaGrad([w], fused=True)
    for _ in range(3):
        w.grad = torch.ones(5, 1, device=HERE).t().as_strided((1, 5), (17, 1))
        opt.step()
    assert opt.state[w]["step"] == 3
    assert is_fused(opt)


def test_a_gradient_of_another_layout_is_copied() -> None:
    fused, loop, one, two = both("AvaGrad", [(4, 6), (3,)])
    for t in range(6):
        grads = random_gradients(one, t)
        step_with(loop, two, grads)
        for p, g in zip(one, grads, strict=True):
            assert g is not None
            p.grad = g.t().contiguous().t().to(HERE) if t == 3 and g.dim() == 2 else g.to(HERE)
        fused.step()
    assert is_fused(fused)
    assert_same(one, two)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_exact_to_the_bit(name: str, dtype: torch.dtype) -> None:
    params = on_device(parameters(dtype))
    grads = list(gradients([torch.nn.Parameter(p.detach().cpu()) for p in params], 10))
    opt = optimizer_class(name)(params, weight_decay=0.1, **FUSED)
    for now in grads[:6]:
        step_with(opt, params, now)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = optimizer_class(name)(others, weight_decay=0.1, **FUSED)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    pickled = copy.deepcopy({"params": params, "opt": opt})
    for now in grads[6:]:
        step_with(opt, params, now)
        step_with(resumed, others, now)
        step_with(pickled["opt"], pickled["params"], now)
    for p, q, r in zip(params, others, pickled["params"], strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_leaves_unscaling_and_skipping_to_the_kernel(unscale: bool) -> None:
    fused, loop, one, two = both("AvaGradW", [(5,), (2049,)], weight_decay=0.1)
    scalers = [torch.amp.GradScaler(HERE, init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    for t in range(9):
        for opt, params, scaler in ((fused, one, scalers[0]), (loop, two, scalers[1])):
            before = copy.deepcopy((params, opt.state_dict()["state"]))
            loss = sum(((i + 1) * p.square()).sum() for i, p in enumerate(params))
            loss = loss * (INF if t in (0, 5) else 1.0)
            opt.zero_grad()
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(opt)
            scaled = params[0].grad.clone()
            scaler.step(opt)
            scaler.update()
            assert torch.equal(params[0].grad, scaled) or opt is loop or unscale  # p.grad is never written to
            if t == 5:
                assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
                for i, state in opt.state_dict()["state"].items():
                    assert all(torch.equal(x, before[1][i][key]) for key, x in state.items())
        assert_same(one, two)
    assert is_fused(fused)
    assert fused.state[one[0]]["step"] == 7


def test_a_plan_does_not_keep_its_optimizer_alive() -> None:
    w = torch.nn.Parameter(torch.ones(3, device=HERE))
    opt = AvaGrad([w], fused=True)
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
    assert is_fused(opt)
    moment = weakref.ref(opt.state[w]["exp_avg"])
    gc.disable()
    try:
        del opt
        assert moment() is None
    finally:
        gc.enable()


def test_torch_compile_calls_the_fused_step() -> None:
    fused, loop, one, two = both("AvaGrad", [(300,), (5,)])
    step: Any = torch.compile(fused.step, backend="eager")
    for t in range(5):
        grads = random_gradients(one, t)
        for p, g in zip(one, grads, strict=True):
            p.grad = laid_out_as(p, g)
        step()
        step_with(loop, two, grads)
    assert is_fused(fused)
    assert_same(one, two)


class Wrapped(torch.Tensor):
    """A tensor whose memory is another's, as those of torch.distributed's functional collectives."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args = torch.utils._pytree.tree_map(lambda x: x.held if isinstance(x, Wrapped) else x, args)
        return func(*args, **(kwargs or {}))


WITHOUT_MEMORY: dict[str, Any] = {
    "wrapped": lambda p: Wrapped(torch.ones(p.shape, device=p.device)),
    "zero": lambda p: torch._efficientzerotensor(p.shape, device=p.device),
}


@pytest.mark.parametrize("what", WITHOUT_MEMORY)
def test_a_gradient_without_memory_of_its_own(what: str) -> None:
    fused, loop, one, two = warm()
    for opt, params in ((fused, one), (loop, two)):
        for p in params:
            p.grad = WITHOUT_MEMORY[what](p)
        opt.step()
    assert_same(one, two)


def test_inference_tensors_are_rejected_as_torch_does() -> None:
    with torch.inference_mode():
        w = torch.nn.Parameter(torch.ones(3, device=HERE))
    w.grad = torch.ones(3, device=HERE)
    opt = AvaGrad([w])

    def two_steps() -> None:  # a first gradient only fills the moments
        opt.step()
        opt.step()

    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        two_steps()


def test_a_plan_that_is_made_in_inference_mode_serves_outside_of_it() -> None:
    fused, loop, one, two = warm()
    for opt in (fused, loop):
        opt.refresh()
        with torch.inference_mode():
            opt.step()
    for opt, params in ((fused, one), (loop, two)):
        opt.param_groups[0]["lr"] = 0.05
        step_with(opt, params, random_gradients(params, 9))
    assert_same(one, two)


def test_real_parameters_in_a_fake_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = torch.nn.Parameter(torch.ones(5, device=HERE))
    w.grad = torch.ones(5, device=HERE)
    opt = AvaGrad([w], fused=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        opt.step()
        opt.step()


def test_a_step_count_that_moves_to_shared_memory() -> None:
    if HERE == "cuda":
        pytest.skip("memory on CUDA devices is shared anyway")
    fused, loop, one, two = warm()
    for opt, params in ((fused, one), (loop, two)):
        for p in params:
            opt.state[p]["step"].share_memory_()
        for t in range(3, 6):
            step_with(opt, params, random_gradients(params, t))
    assert_same(one, two)
    assert fused.state[one[0]]["step"] == 6


def test_a_parameter_of_another_dtype_at_the_same_address() -> None:
    """As malloc may arrange it when a model goes to float32 and back."""
    values = torch.linspace(0.5, 2, 64)
    bits = values.to(torch.float16).to(HERE)
    w = torch.nn.Parameter(bits)
    opt = AvaGrad([w], fused=True)
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
    w.data = bits.view(torch.bfloat16)
    w.data.copy_(values)
    w.grad = torch.ones_like(w)
    other = torch.nn.Parameter(w.detach().clone())
    loop = AvaGrad([other], foreach=False)
    loop.load_state_dict(copy.deepcopy({**opt.state_dict(), "param_groups": loop.state_dict()["param_groups"]}))
    other.grad = torch.ones_like(other)
    opt.step()
    loop.step()
    torch.testing.assert_close(w.detach(), other.detach(), rtol=2**-7, atol=0)


def test_a_gradient_of_another_dtype_keeps_its_digits() -> None:
    moments = []
    for options in (FUSED, {"foreach": False}):
        w = torch.nn.Parameter(torch.ones(4, device=HERE, dtype=torch.bfloat16))
        w.grad_dtype = torch.float32
        opt = AvaGrad([w], **options)
        for _ in range(3):
            w.grad = torch.tensor([1.001, 1.002, 1.003, 1.004], device=HERE)
            opt.step()
        moments.append(opt.state[w]["exp_avg"])
    torch.testing.assert_close(*moments, rtol=1e-6, atol=0)


def test_a_gradient_of_a_narrower_dtype_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for options in ({"foreach": False}, FUSED):
        if options is FUSED:
            monkeypatch.delattr(Loop, "_move")
        w, other = torch.nn.Parameter(torch.ones(4, device=HERE)), torch.nn.Parameter(torch.ones(3, device=HERE))
        w.grad_dtype = torch.bfloat16
        opt = AvaGrad([w, other], **options)
        for _ in range(3):
            w.grad = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16, device=HERE)
            other.grad = torch.ones_like(other)
            opt.step()
        weights.append(w.detach())
    torch.testing.assert_close(*weights, rtol=1e-6, atol=0)


def test_frozen_integers_of_a_quantised_model_do_not_take_the_kernels_away() -> None:
    w = torch.nn.Parameter(torch.ones(4))
    q = torch.nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    for choice in (None, True):
        opt = AvaGrad([w, q], fused=choice)
        w.grad = torch.ones(4)
        opt.step()
        assert opt._params is not None
        assert [type(backend) for backend in opt._params.backends] == [fused_backend.Fused]
        assert q not in opt.state


@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernels_compile_for_a_gpu(capability: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compiled_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), capability], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("compiled\n", 0), done.stderr
