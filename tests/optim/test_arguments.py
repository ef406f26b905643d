"""Bad input gets a sentence that names the argument, its value and what is allowed; nothing is lost."""

import inspect
import math
import sys
from typing import Any

import pytest
import torch
from problems import ALL, DELAYED, optimizer_class, own_options

import avagrad
from avagrad import AvaGrad, AvaStep
from avagrad.optim import no_decay_groups
from avagrad.optim.backends import fused


def one() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


NAN, INF = math.nan, math.inf
BAD: list[tuple[str, Any, str]] = [
    *[
        ("lr", x, "a finite number of at least 0, or a float tensor that holds one")
        for x in (-0.1, NAN, INF, "1", None, True)
    ],
    ("lr", 10**400, "a finite number of at least 0"),
    ("lr", torch.tensor(NAN), "a finite number of at least 0"),
    ("lr", torch.tensor(-1.0), "a finite number of at least 0"),
    ("lr", torch.ones(2), "a finite number of at least 0, or a float tensor"),
    ("lr", torch.tensor(1), "a finite number of at least 0"),
    *[("betas", x, "two numbers from 0") for x in ((1.0, 0.9), (0.9, -0.1), (0.9, NAN), (0.9,), 0.9, ("a", 0.9))],
    *[("eps", x, "a number from 1e-15 to 1e") for x in (0.0, 0, 1e-16, 1e16, -1.0, NAN, INF, "small", None)],
    *[("weight_decay", x, "a finite number of at least 0") for x in (-1e-4, NAN, INF, None, False)],
    *[(key, 1, "True or False") for key in ("maximize", "capturable")],
    *[(key, "yes", "True, False or None") for key in ("foreach", "fused")],
]
ONLY: dict[str, list[tuple[str, Any, str]]] = {
    "AvaGrad": [
        *[("norm", x, "1 or 2") for x in (0, 3, 2.0, INF, "2", None, True)],
        ("active_only", 1, "True or False"),
    ],
    "AvaGradW": [("norm", 1.5, "1 or 2"), ("bias_correction", None, "True or False")],
    "DelayedAdam": [
        ("active_only", "no", "True or False"),
        *[("clip_update", x, "a number above 0 and up to 1e15") for x in (0, -1.0, NAN, INF, 1e16, "1", True)],
    ],
    "AvaStep": [
        ("clip_update", 0.0, "a number above 0 and up to 1e15, or None"),
        *[("clip_moment", x, "a number above 1 and up to 1e15, or None") for x in (1.0, 0, NAN, INF, "10")],
        ("norm", 3, "1 or 2"),
        ("decoupled_weight_decay", 1, "True or False"),
    ],
    "ADOPT": [("decoupled_weight_decay", 1, "True or False")],
    "AdaBound": [
        ("final_lr", -1, "a finite number of at least 0"),
        ("gamma", 0, "a number above 0"),
        ("amsbound", 0, "True or False"),
    ],
    "AdaShift": [
        *[("keep", x, "a whole number of at least 1") for x in (0, 1.5, -3, True)],
        ("reduce", "mean", "'max'"),
    ],
}


@pytest.mark.parametrize(
    ("name", "key", "value", "allowed"), [(name, *case) for name in ALL for case in (*BAD, *ONLY[name])]
)
def test_bad_values_are_named(name: str, key: str, value: Any, allowed: str) -> None:
    """In the constructor and in a group alike; a group that is refused leaves the optimizer as it was."""
    with pytest.raises(ValueError, match=f"^{name}: {key} is ") as error:
        optimizer_class(name)([one()], **{key: value})
    assert f"but must be {allowed}" in str(error.value)
    if not isinstance(value, torch.Tensor):
        assert repr(value) in str(error.value)
    opt = optimizer_class(name)([one()])
    group = {"params": [one()], key: value}
    with pytest.raises(ValueError, match=f"^{name}: {key} is "):
        opt.add_param_group(group)
    assert len(opt.param_groups) == 1
    assert set(group) == {"params", key}


@pytest.mark.parametrize("name", ["AdaBound", "AdaShift"])
def test_fused_is_rejected_where_there_is_no_kernel(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: fused is True, but this class has no fused implementation"):
        optimizer_class(name)([one()], fused=True)
    optimizer_class(name)([one()], fused=False)


def test_fused_says_what_a_parameter_must_be() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "INTERPRET", True)
        with pytest.raises(
            ValueError, match=r"a parameter is torch\.float64; on cpu it must be one of float32, bfloat16"
        ):
            AvaGrad([torch.nn.Parameter(torch.ones(2).double())], fused=True)
    with pytest.raises(ValueError, match="fused is True, but a parameter is on meta; it must be on a CUDA device or"):
        AvaGrad([torch.nn.Parameter(torch.ones(2, device="meta"))], fused=True)
    gaps = torch.nn.Parameter(torch.ones(4, 4)[:, ::2])
    with pytest.raises(ValueError, match=r"fused is True, but a parameter of shape \(4, 2\) has gaps or overlaps"):
        AvaGrad([gaps], fused=True)
    opt = AvaGrad([one()])
    with pytest.raises(ValueError, match="has gaps or overlaps"):
        opt.add_param_group({"params": [gaps], "fused": True})
    assert len(opt.param_groups) == 1


def test_fused_says_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "INTERPRET", True)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="fused is True, but Triton cannot be imported"):
        AvaGrad([one()], fused=True)


def test_flags_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="foreach is True and fused is True, but only one"):
        AvaGrad([one()], foreach=True, fused=True)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("beta", "betas"),
        ("betas_", "betas"),
        ("epsilon", "eps"),
        ("esp", "eps"),
        ("EPS", "eps"),
        ("ep", "eps"),
        ("rl", "lr"),
        ("LR", "lr"),
        ("learning_rate", "lr"),
        ("weightdecay", "weight_decay"),
        ("wieght_decay", "weight_decay"),
        ("weight-decay", "weight_decay"),
        ("weight_decat", "weight_decay"),
        ("activeonly", "active_only"),
        ("bias_corection", "bias_correction"),
        ("capturabel", "capturable"),
        ("beta1", "betas"),
        ("wd", "weight_decay"),
        ("maximise", "maximize"),
    ],
)
def test_what_nearly_spells_one_of_ours_is_rejected(key: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"^AvaGrad: {key}=0.5 is not an argument of.*did you mean '{near}'"):
        optimizer_class("AvaGrad")([one()], **{key: 0.5})
    with pytest.raises(ValueError, match=f"has the key '{key}', which looks like a misspelled '{near}'"):
        AvaGrad([{"params": [one()], key: 0.5}])


def test_the_class_says_whether_decay_is_decoupled() -> None:
    with pytest.raises(ValueError, match="AvaGrad: decoupled_weight_decay is True, but must be False"):
        AvaGrad([{"params": [one()], "decoupled_weight_decay": True}])


@pytest.mark.parametrize("name", ALL)
def test_what_is_used_instead_of_a_differentiable_step(name: str) -> None:
    with pytest.raises(
        TypeError, match=r"differentiable=True is not an argument .*follow the functions of avagrad\.optim"
    ):
        optimizer_class(name)([one()], differentiable=True)


@pytest.mark.parametrize("name", ALL)
def test_complex_parameters_are_rejected(name: str) -> None:
    z = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=rf"{name}: a parameter of shape \(2,\) is torch\.complex64.*view_as_real"):
        optimizer_class(name)([z])
    opt = optimizer_class(name)([one()])
    with pytest.raises(ValueError, match="must be real"):
        opt.add_param_group({"params": [z]})
    assert len(opt.param_groups) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ALL)
def test_a_parameter_that_appears_twice_is_rejected(name: str) -> None:
    w, other = one(), one()
    for twice in ([w, w], [("a", w), ("b", w)]):
        with pytest.raises(ValueError, match=rf"{name}: a parameter of shape \(2,\) appears twice"):
            optimizer_class(name)(twice)
    opt = optimizer_class(name)([w, other])
    opt.param_groups[0]["params"][1] = w  # by hand
    w.grad = torch.ones(2)
    with pytest.raises(ValueError, match="appears twice"):
        opt.step()
    assert not opt.state
    assert torch.equal(w, torch.ones(2))


def test_other_unknown_keywords_get_the_list() -> None:
    with pytest.raises(TypeError, match=r"amsgrad=True is not an argument .* the keywords are params, lr, betas"):
        optimizer_class("AvaGrad")([one()], amsgrad=True)


OWN_KEYS = "initial_lr name max_lr min_lr lr_scale lr_mult group_name layer_decay base_momentum max_momentum swa_lr"
OWN_KEYS += " step steps params_count used ops reps form names tag is_bias layer epoch ratio wd_mult layer_id momentum"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("key", OWN_KEYS.split())
def test_keys_of_the_users_own_are_left_alone(name: str, key: str) -> None:
    marker = object()
    opt = optimizer_class(name)([{"params": [one()], key: marker}])
    assert opt.param_groups[0][key] is marker


def test_adabound_checks_its_base_lr() -> None:
    for bad in (NAN, -1.0, "x"):
        with pytest.raises(ValueError, match=r"base_lr is .* but must be a finite number"):
            optimizer_class("AdaBound")([{"params": [one()], "base_lr": bad}])
    with pytest.raises(ValueError, match="looks like a misspelled 'base_lr'"):
        optimizer_class("AdaBound")([{"params": [one()], "bse_lr": 0.1}])


@pytest.mark.parametrize("name", ALL)
def test_sparse_gradients_are_rejected_before_anything_changes(name: str) -> None:
    dense, embedding = one(), torch.nn.Embedding(4, 2, sparse=True)
    opt = optimizer_class(name)([{"params": [dense]}, {"params": embedding.parameters()}])
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient has the layout torch\.sparse_coo, but must be dense"):
        opt.step()
    assert torch.equal(dense, torch.ones(2))
    assert not opt.state


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("given", [torch.nn.Linear(1, 1), None, 3])
def test_what_is_no_parameters_is_rejected(name: str, given: Any) -> None:
    sentence = rf"^{name}: params is .*, but must be parameters or groups of them, such as model\.parameters\(\)\.$"
    with pytest.raises(TypeError, match=sentence):
        optimizer_class(name)(given)
    assert len(optimizer_class(name)(torch.nn.ParameterList([one(), one()])).param_groups[0]["params"]) == 2


def test_torchs_own_refusals_still_work() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        AvaGrad([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        AvaGrad(one())
    w = one()
    with pytest.raises(ValueError, match="more than one parameter group"):
        AvaGrad([{"params": [w]}, {"params": [w]}])
    with pytest.raises(ValueError, match="non-leaf"):
        AvaGrad([one() * 2])


def test_signatures_are_what_we_promise() -> None:
    expected = (
        "(self, params, lr=0.1, betas=(0.9, 0.999), eps=0.1, weight_decay=0.0, *, bias_correction=True, "
        "norm=2, active_only=False, clip_update=None, maximize=False, rounding='nearest', rounding_seed=0, "
        "foreach=None, capturable=False, fused=None, process_group=None)"
    )
    signature = inspect.signature(AvaGrad.__init__)
    bare = signature.replace(
        parameters=[p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == expected
    delayed = inspect.signature(avagrad.DelayedAdam).parameters
    assert (delayed["lr"].default, delayed["eps"].default) == (1e-3, 1e-8)
    assert "norm" not in delayed
    assert inspect.signature(avagrad.AvaGradW) == inspect.signature(AvaGrad)


# --- no_decay_groups -----------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.attention = torch.nn.MultiheadAttention(4, 2)  # has in_proj_bias
        self.norm = torch.nn.LayerNorm((3, 4))  # two-dimensional weights
        self.conv = torch.nn.Conv2d(2, 2, 3)
        self.batch = torch.nn.BatchNorm2d(2)
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.embedding.weight  # tied
        self.bias = torch.nn.Parameter(torch.zeros(2, 2))  # two-dimensional, and a bias by its name
        self.temperature = torch.nn.Parameter(torch.zeros(()))
        self.frozen = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_no_decay_groups() -> None:
    model = Model()
    names = {id(p): name for name, p in model.named_parameters()}
    with_decay, without = no_decay_groups(model, weight_decay=0.05)
    assert {names[id(p)] for p in with_decay["params"]} == {
        "embedding.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "conv.weight",
        "frozen",
    }
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.05, 0.0)
    assert len(with_decay["params"]) + len(without["params"]) == len(names)
    opt = AvaGrad(no_decay_groups(torch.nn.Linear(2, 2, bias=False), weight_decay=0.1))
    assert [len(group["params"]) for group in opt.param_groups] == [1, 0]


def test_no_decay_groups_rejects() -> None:
    with pytest.raises(ValueError, match="no_decay_groups: weight_decay is nan, but must be a finite number"):
        no_decay_groups(Model(), weight_decay=NAN)
    with pytest.raises(TypeError, match=r"model is of type list, but must be a torch\.nn\.Module"):
        no_decay_groups([], weight_decay=0.1)  # type: ignore[arg-type]


# --- diagnostics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("active_only", [False, True])
def test_diagnostics_say_what_the_next_step_will_do(name: str, active_only: bool) -> None:
    """With beta1 = 0 the next move is rate * gradient: its ratios are the rates that diagnostics name, to 1 %."""
    w = torch.nn.Parameter(torch.zeros(300).double())
    z = torch.nn.Parameter(torch.zeros(1).double())
    options = own_options(name, active_only=active_only, clip_update=None)
    active_only = active_only or name == "AvaStep"
    opt = optimizer_class(name)(
        [{"params": [w]}, {"params": [z], "lr": 0.25}], lr=0.5, eps=0.01, betas=(0.0, 0.9), **options
    )
    g = torch.linspace(0, 3, 300).double()  # the first has never a gradient
    w.grad, z.grad = g.clone(), torch.ones(1).double()
    opt.step()
    found = opt.diagnostics()
    before = w.detach().clone(), z.detach().clone()
    w.grad, z.grad = torch.ones(300).double(), torch.ones(1).double()
    opt.step()
    rates = torch.cat([before[0] - w.detach(), before[1] - z.detach()])
    rates = rates[1:] if active_only else rates
    assert found["rate_min"] == pytest.approx(rates.min().item(), rel=0.01)
    assert found["rate_max"] == pytest.approx(rates.max().item(), rel=0.01)
    assert found["rate_median"] == pytest.approx(rates.median().item(), rel=0.01)
    r = torch.cat([g, torch.ones(1).double()])
    eta = 1 / (r + 0.01)
    r, eta = (r[1:], eta[1:]) if active_only else (r, eta)
    x = eta * r if name == "AvaStep" else eta
    gamma = 1.0 if name == "DelayedAdam" else (len(x) / (x**2).sum()).sqrt().item()
    assert found["gamma"] == pytest.approx(gamma, rel=1e-9)
    largest = (x**2).sort(descending=True).values[: math.ceil(len(x) / 100)].sum() / (x**2).sum()
    assert found["norm_share_of_top_1_percent"] == pytest.approx(largest.item(), rel=0.01)
    assert found["inactive_share"] == 1 / 301
    lr = torch.full_like(eta, 0.5)
    lr[-1] = 0.25
    moves = lr * gamma * eta * r  # by the gradient that was, which is the usual size
    assert found["step_rms_predicted"] == pytest.approx(moves.square().mean().sqrt().item(), rel=1e-6)
    assert found["step_rms"] == pytest.approx(found["step_rms_predicted"], rel=1e-6)
    assert found["clipped_share"] == 0


def test_diagnostics_of_a_clamp() -> None:
    """The momentum of [1, 4] is held back to half the usual size in both, of [0.25, 4] in the second alone."""
    w = torch.nn.Parameter(torch.zeros(2).double())
    for first, share in (1.0, 1.0), (0.1, 0.5):
        opt = AvaStep([w], lr=0.1, betas=(0.0, 0.5), clip_update=0.5)
        for g in ([1.0, 4.0], [first, 4.0]):
            w.grad = torch.tensor(g).double()
            opt.step()
        found = opt.diagnostics()
        assert found["clipped_share"] == share
        assert found["step_rms_predicted"] == pytest.approx(0.1)
        assert found["step_rms"] <= 0.05 * (1 + 1e-9)


def test_diagnostics_count_no_rounding_as_a_clamp() -> None:
    """After one gradient every momentum is its typical size, but for the last digit."""
    w = torch.nn.Parameter(torch.zeros(10_000))
    opt = AvaStep([w])
    w.grad = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    opt.step()
    assert opt.diagnostics()["clipped_share"] == 0


def test_diagnostics_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for size in (2**20, 7):
        monkeypatch.setattr("avagrad.optim.diagnostics.CPU_SIZE", size)
        w = torch.nn.Parameter(torch.zeros(6, 9).t())
        opt = AvaStep([w])
        for t in range(3):
            w.grad = torch.randn(9, 6, generator=torch.Generator().manual_seed(t))
            opt.step()
        ends.append(opt.diagnostics())
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_diagnostics_of_a_training_that_has_failed(sign: float) -> None:
    """A NaN of either sign is shown, and is no error."""
    w = torch.nn.Parameter(torch.zeros(3))
    opt = AvaGrad([w])
    for _ in range(2):
        w.grad = torch.ones(3)
        opt.step()
    opt.state[w]["exp_avg_sq"][1] = math.copysign(NAN, sign)
    assert math.isnan(opt.diagnostics()["rate_max"])


@pytest.mark.parametrize("name", DELAYED)
def test_diagnostics_before_the_first_step(name: str) -> None:
    opt = optimizer_class(name)([one()])
    found = opt.diagnostics()
    assert found.pop("gamma") == 1.0
    assert len(found) == 8
    assert not any(found.values())
    assert not opt.state
    if name == "AvaStep":
        return
    opt = optimizer_class(name)([one()], lr=0.5, eps=0.25, bias_correction=False)
    rate = pytest.approx(2.0 if name == "DelayedAdam" else 0.5, rel=0.01)
    assert opt.diagnostics()["rate_median"] == rate
    with torch.device("meta"):  # as a default device would be
        assert opt.diagnostics()["rate_max"] == rate
