"""The native code: which is chosen, and what is done without it."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from problems import gradients, is_fused, laid_out_as, parameters

from avagrad import AvaGrad
from avagrad.optim.backends import choose, native
from avagrad.optim.rules import Flags


def one() -> torch.nn.Parameter:
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    return w


def steps(opt: Any, n: int = 3) -> None:
    for _ in range(n):
        opt.step()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that was built without its native code."""
    for name in ("_native", "_native_avx2", "_native_avx512"):
        monkeypatch.setitem(sys.modules, f"avagrad.optim.backends.{name}", None)
    for cached in (native.load, choose._warn_of_missing_native):
        cached.cache_clear()
    yield
    for cached in (native.load, choose._warn_of_missing_native):
        cached.cache_clear()


@pytest.mark.usefixtures("without_native")
def test_without_native_code_the_default_is_foreach_and_says_so_once() -> None:
    with pytest.raises(ValueError, match="AvaGrad: fused is True, but avagrad was built without its native code"):
        AvaGrad([one()], fused=True)
    opt = AvaGrad([w := one()])
    with pytest.warns(UserWarning, match="install it from a wheel"):
        steps(opt)
    steps(AvaGrad([one()]))
    assert not is_fused(opt)
    assert opt.state[w]["step"] == 3
    slow = AvaGrad([x := one()], foreach=True)
    steps(slow)
    assert torch.equal(w, x)


@pytest.mark.usefixtures("without_native")
def test_native_code_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a damaged file, or another OpenMP runtime: building it again would be the wrong advice."""

    def fail(name: str) -> Any:
        raise ImportError("undefined symbol: GOMP_parallel")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(
        ValueError, match=r"the native code for CPUs cannot be loaded \(undefined symbol: GOMP_parallel"
    ):
        AvaGrad([one()], fused=True)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": False}])
def test_without_native_code_a_chosen_path_is_not_warned_of(options: dict[str, bool]) -> None:
    steps(AvaGrad([one()], **options))  # type: ignore[arg-type]


CHOSEN = {"AVX512": "_native_avx512", "AVX2": "_native_avx2", "DEFAULT": "_native"}


@pytest.mark.parametrize("capability", CHOSEN)
def test_the_code_is_for_this_processor(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that can do more runs what is for lesser ones, too."""
    here = torch.backends.cpu.get_cpu_capability()
    if list(CHOSEN).index(capability) < list(CHOSEN).index(here if here in CHOSEN else "DEFAULT"):
        pytest.skip(f"this processor has {here}")
    native.load.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    try:
        assert native.load()[0].__name__.endswith(CHOSEN[capability])
        steps(opt := AvaGrad([one()]))
        assert is_fused(opt)
    finally:
        native.load.cache_clear()


def test_bad_arguments_of_the_extension_are_errors() -> None:
    count = 14 + 5 + len(Flags._fields)
    for wrong in (2, count - 1, count + 1):  # a flag that native.c does not know is not dropped
        with pytest.raises(TypeError, match=rf"takes {count} numbers, but got {wrong}"):
            native.load()[0].step(*[0] * wrong)
    with pytest.raises(TypeError):
        native.load()[0].step("no address", *[0] * (count - 1))


def test_the_number_of_threads_does_not_show() -> None:
    ends = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            params = [*parameters(), torch.nn.Parameter(torch.linspace(-1, 1, 100003))]
            opt = AvaGrad(params, eps=1e-3, weight_decay=0.1, fused=True)
            for grads in gradients(params, 6):
                for p, g in zip(params, grads, strict=True):
                    p.grad = laid_out_as(p, g)
                opt.step()
        finally:
            torch.set_num_threads(1)
        ends.append(params)
    assert all(torch.equal(p, q) for other in ends[1:] for p, q in zip(ends[0], other, strict=True))


def test_torch_and_the_native_code_share_one_openmp() -> None:
    """Two of them would have twice the threads, which wait for work by burning time.

    In a process of its own: other tests may have loaded a library that brings another one.
    """
    code = (
        "import torch, avagrad\n"
        "w = torch.nn.Parameter(torch.ones(3))\n"
        "w.grad = torch.ones(3)\n"
        "avagrad.AvaGrad([w], fused=True).step()\n"
        "print(open('/proc/self/maps').read())\n"
    )
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}) == 1
    assert any("avagrad" in line and line.endswith(".so") for line in maps), "the native code was loaded"
