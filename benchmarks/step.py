"""Step time and memory of our optimizers compared with torch's.

Run: python benchmarks/step.py --json step.json
"""

import argparse
from pathlib import Path

import torch

from avagrad import bench


def main() -> None:
    """Measure, print one table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sets", nargs="+", choices=list(bench.SETS), help="default: all that fit the device")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = bench.run(device, arguments.sets or bench.fitting(device))
    print(", ".join(f"{key} {value}" for key, value in bench.describe(device).items()))
    print(bench.table(rows))
    if arguments.json:
        bench.save(rows, device, arguments.json)


if __name__ == "__main__":
    main()
