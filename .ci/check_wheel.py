"""Checks a wheel: ``python .ci/check_wheel.py FILE``. The native libraries are in it, and no OpenMP runtime."""

import platform
import re
import sys
import zipfile


def faults(path: str) -> list[str]:
    """Say what is wrong with a wheel."""
    names = zipfile.ZipFile(path).namelist()
    wanted = ["_native", "_native_avx2", "_native_avx512"] if platform.machine() in ("x86_64", "AMD64") else ["_native"]
    found = [f"{name} is missing" for name in wanted if not any(f"/backends/{name}.abi3." in each for each in names)]
    found += [f"{name} is bundled" for name in names if re.search(r"lib[gi]?omp", name)]
    return found + ([] if "-cp311-abi3-" in path else ["its tag is not cp311-abi3"])


if __name__ == "__main__":
    sys.exit("\n".join(f"{sys.argv[1]}: {fault}" for fault in faults(sys.argv[1])) or None)
