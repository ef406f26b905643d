"""The native code: how it is built, kept and done without."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import gradients, is_fused, laid_out_as, parameters

from avagrad import AvaGrad
from avagrad.optim.backends import native


@pytest.fixture
def built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Forget the library, and look for it in an empty cache; what is found there is forgotten again."""
    monkeypatch.setenv("AVAGRAD_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    native.library.cache_clear()


def one() -> torch.nn.Parameter:
    w = torch.nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    return w


def steps(opt: Any, n: int = 3) -> None:
    for _ in range(n):
        opt.step()


def test_without_a_compiler_the_default_is_another_path_and_fused_says_what_is_missing(
    built_anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match="AvaGrad: fused is True, but no C compiler has been found"):
        AvaGrad([one()], fused=True)
    opt = AvaGrad([w := one()])
    steps(opt)
    assert not is_fused(opt)
    assert opt.state[w]["step"] == 3


def test_a_compiler_that_fails_is_quoted(built_anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "broken", "echo 'cannot do that' >&2; exit 1")))
    with pytest.raises(ValueError, match=r"the C compiler .*broken could not build the native code \(cannot do that\)"):
        AvaGrad([one()], fused=True)
    assert list(built_anew.iterdir()) == []
    forget()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ValueError, match=r"\(it ended with the status 1 and said nothing\)"):
        AvaGrad([one()], fused=True)


def test_a_compiler_that_does_not_know_its_processor(
    built_anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuses = 'case "$*" in *-march=native*) exit 1;; *) exec cc "$@";; esac'
    monkeypatch.setenv("CC", str(script(tmp_path / "plain", refuses)))
    steps(AvaGrad([one()], fused=True))


def test_it_is_built_once_and_kept(built_anew: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = script(tmp_path / "logged", f'echo built >> {log}; exec cc "$@"')
    code = "import torch, avagrad; avagrad.AvaGrad([torch.nn.Parameter(torch.ones(2))], fused=True)"
    for _ in range(2):
        env = {**os.environ, "CC": str(compiler), "AVAGRAD_CACHE_DIR": str(built_anew)}
        subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert log.read_text() == "built\n"
    assert len(list(built_anew.iterdir())) == 1


def test_a_cache_that_cannot_be_written_to_is_done_without(
    built_anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AVAGRAD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    opt = AvaGrad([one()], fused=True)
    steps(opt)
    assert is_fused(opt)


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


def script(path: Path, commands: str) -> Path:
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
