"""The cost of a step: time, host time, launches and memory, compared with torch's optimizers, for real models.

It needs only torch. Run: ``python -m avagrad.bench --json step.json``
"""

import argparse
import importlib.util
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import avagrad

__all__ = [
    "SETS",
    "Row",
    "cell",
    "copy_bandwidth",
    "describe",
    "fitting",
    "main",
    "markdown",
    "measure",
    "run",
    "table",
]

Shapes = list[tuple[int, ...]]


def _resnet50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def _gpt(layers: int, width: int) -> Shapes:
    shapes: Shapes = [(50257, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


# name: (shapes, dtype, fits on a CPU)
SETS: dict[str, tuple[Shapes, torch.dtype, bool]] = {
    "resnet50": (_resnet50(), torch.float32, True),
    "gpt2-124M": (_gpt(12, 768), torch.float32, False),
    "gpt-1.5B": (_gpt(48, 1600), torch.float32, False),
    "1000x1024": ([(1024,)] * 1000, torch.float32, True),
    "gpt2-124M-bf16": (_gpt(12, 768), torch.bfloat16, False),
    "4x4096x4096": ([(4096, 4096)] * 4, torch.float32, True),
}


def fitting(device: torch.device) -> list[str]:
    """Return the names of the sets that should fit on a device.

    >>> fitting(torch.device("cpu"))
    ['resnet50', '1000x1024', '4x4096x4096']
    """
    return [name for name, (_, _, on_cpu) in SETS.items() if on_cpu or device.type == "cuda"]


@dataclass
class Row:
    """One optimizer on one set of parameters.

    >>> Row("a set", "an optimizer", 1.0, 0.5, 0.9, 1.1, 3, 0.25).of_floor
    1.1
    """

    parameters: str
    optimizer: str
    milliseconds: float  # per step, without synchronisation between steps
    host_milliseconds: float  # of the host, per step
    of_fused_adamw: float | None
    of_floor: float | None  # on CUDA: relative to moving the necessary bytes at the measured copy bandwidth
    launches: int | None
    extra_megabytes: float | None  # peak memory above parameters, gradients and state


def variants(dtype: torch.dtype) -> dict[str, Callable[[list[Tensor]], Any]]:
    """Return the optimizers to compare; torch's fused AdamW, the reference, comes first."""
    made: dict[str, Callable[[list[Tensor]], Any]] = {"torch AdamW fused": lambda p: torch.optim.AdamW(p, fused=True)}
    made["torch Adam fused"] = lambda p: torch.optim.Adam(p, fused=True)
    made["torch AdamW foreach"] = lambda p: torch.optim.AdamW(p, foreach=True)
    made["AvaGrad fused"] = lambda p: avagrad.AvaGrad(p, fused=True)
    made["AvaGradW fused"] = lambda p: avagrad.AvaGradW(p, weight_decay=1e-4, fused=True)
    made["AvaStep fused"] = lambda p: avagrad.AvaStep(p, fused=True)
    made["DelayedAdam fused"] = lambda p: avagrad.DelayedAdam(p, fused=True)
    if dtype == torch.bfloat16:
        made["AvaGrad fused, stochastic"] = lambda p: avagrad.AvaGrad(p, fused=True, rounding="stochastic")
        made["AvaGrad fused, kahan"] = lambda p: avagrad.AvaGrad(p, fused=True, rounding="kahan")
    made["AvaGrad foreach"] = lambda p: avagrad.AvaGrad(p, foreach=True)
    made["AvaGrad loop"] = lambda p: avagrad.AvaGrad(p, foreach=False)
    if importlib.util.find_spec("pytorch_optimizer"):
        peer: Any = importlib.import_module("pytorch_optimizer").AvaGrad
        made["pytorch_optimizer AvaGrad"] = lambda p: peer(p)
        if "foreach" in inspect.signature(peer).parameters:
            made["pytorch_optimizer AvaGrad, foreach=False"] = lambda p: peer(p, foreach=False)
    return made


def describe(device: torch.device) -> dict[str, str]:
    """Return the device and the versions of a result.

    >>> sorted(describe(torch.device("cpu")))
    ['avagrad', 'device', 'python', 'torch', 'triton']
    """
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
        "triton": importlib.import_module("triton").__version__ if has_triton else "none",
        "python": platform.python_version(),
        "avagrad": avagrad.__version__,
    }


def _processor() -> str:
    """Return the processor's name, with the numbers that tell generations apart where names do not."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return ", ".join([facts.get("model name", platform.machine()), *numbers])


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy, read and written.

    >>> copy_bandwidth(torch.device("cpu")) > 1e8
    True
    """
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / (_time(lambda: target.copy_(source), device, 10)[0] * 1e-3)


def measure(opt: Any, device: torch.device, steps: int = 20, repeats: int = 7) -> tuple[float, float]:
    """Return the milliseconds of a step, in total and on the host: medians over repeats of some steps.

    >>> w = torch.nn.Parameter(torch.ones(3))
    >>> w.grad = torch.ones(3)
    >>> step, host = measure(avagrad.AvaGrad([w]), torch.device("cpu"), steps=2, repeats=3)
    >>> step > 0
    True
    """
    for _ in range(3):
        opt.step()
    return _time(opt.step, device, steps, repeats)


def _time(work: Callable[[], Any], device: torch.device, steps: int, repeats: int = 7) -> tuple[float, float]:
    work()
    totals, hosts = [], []
    for _ in range(repeats):
        if device.type != "cuda":
            start = time.perf_counter()
            for _ in range(steps):
                work()
            totals.append((time.perf_counter() - start) / steps * 1e3)
            hosts.append(totals[-1])
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        for _ in range(steps):
            work()
        hosts.append((time.perf_counter() - start) / steps * 1e3)
        end.record()
        torch.cuda.synchronize()
        totals.append(begin.elapsed_time(end) / steps)
    return statistics.median(totals), statistics.median(hosts)


def _launches(opt: Any) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        opt.step()
        torch.cuda.synchronize()
    events: Any = profile.events()
    return len([event for event in events if event.device_type.name == "CUDA"])


def run(device: torch.device, names: Iterable[str], optimizers: Iterable[str] | None = None) -> list[Row]:
    """Measure optimizers on sets of parameters; slow variants are timed over fewer steps.

    >>> rows = run(torch.device("cpu"), ["1000x1024"], ["torch AdamW fused"])
    >>> rows[0].of_fused_adamw
    1.0
    """
    bandwidth = copy_bandwidth(device)
    rows: list[Row] = []
    for name in names:
        shapes, dtype, _ = SETS[name]
        torch.manual_seed(0)
        params: list[Tensor] = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        n = sum(p.numel() for p in params)
        moments = 16  # read and write two float32 moments
        floor = n * (3 * params[0].element_size() + moments) / bandwidth * 1e3
        adamw: float | None = None
        for label, make in variants(dtype).items():
            if optimizers is not None and label not in optimizers:
                continue
            opt = make(params)
            slow = "loop" in label or "pytorch_optimizer" in label
            milliseconds, host = measure(opt, device, *((3, 3) if slow else (20, 7)))
            launches = extra = None
            if device.type == "cuda":
                launches = None if slow else _launches(opt)
                state = sum(
                    x.numel() * x.element_size()
                    for s in opt.state.values()
                    for x in s.values()
                    if isinstance(x, Tensor)
                )
                known = 2 * n * params[0].element_size() + state
                torch.cuda.reset_peak_memory_stats()
                opt.step()
                torch.cuda.synchronize()
                extra = (torch.cuda.max_memory_allocated() - known) / 2**20
            adamw = milliseconds if label == "torch AdamW fused" else adamw
            ratio = milliseconds / adamw if adamw else None
            # A CPU's copy is not a floor: it also reads its target, which a step does not.
            of_floor = milliseconds / floor if device.type == "cuda" else None
            rows.append(Row(name, label, milliseconds, host, ratio, of_floor, launches, extra))
            del opt
        del params
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown.

    >>> print(table([Row("a", "b", 1.0, 0.5, 0.9, 1.1, 3, 0.25)]))
    | parameters | optimizer | ms | host ms | of fused AdamW | of the floor | launches | extra MB |
    | --- | --- | --- | --- | --- | --- | --- | --- |
    | a | b | 1.000 | 0.500 | 0.90 | 1.10 | 3 | 0.2 |
    """
    lines = [
        [
            row.parameters,
            row.optimizer,
            cell(row.milliseconds, 3),
            cell(row.host_milliseconds, 3),
            cell(row.of_fused_adamw, 2),
            cell(row.of_floor, 2),
            cell(row.launches, 0),
            cell(row.extra_megabytes, 1),
        ]
        for row in rows
    ]
    headings = ["parameters", "optimizer", "ms", "host ms", "of fused AdamW", "of the floor", "launches", "extra MB"]
    return markdown(headings, lines)


def cell(x: float | None, digits: int) -> str:
    """Return a number for a table, or an empty string for None.

    >>> cell(1.25, 1), cell(None, 1)
    ('1.2', '')
    """
    return "" if x is None else f"{x:.{digits}f}"


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, ["---"] * len(headings), *lines])


def save(rows: list[Row], device: torch.device, path: Path) -> None:
    """Write the rows, the device and the versions as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": describe(device), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print one table, and write JSON.

    >>> main(["--device", "cpu", "--sets", "resnet50", "--dry-run"])
    on cpu: resnet50
    0
    """
    parser = argparse.ArgumentParser("python -m avagrad.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), help="default: all that fit the device")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    names = given.sets or fitting(device)
    if given.dry_run:
        print(f"on {device}: {', '.join(names)}")
        return 0
    rows = run(device, names)
    print(", ".join(f"{key} {value}" for key, value in describe(device).items()))
    print(table(rows))
    if given.json:
        save(rows, device, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
