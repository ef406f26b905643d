"""Builds the native code of the fused CPU path; everything else is in pyproject.toml.

It is optional: where no C compiler or no header of Python's is at hand, the package works without it.
"""

import platform

from setuptools import Extension, setup

SOURCE = "src/avagrad/optim/backends/native.c"
FLAGS = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
variants = {"_native": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    # Chosen where torch finds these, too.
    variants["_native_avx2"] = ["-mavx2", "-mfma"]
    wide = ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"]
    variants["_native_avx512"] = wide

setup(
    ext_modules=[
        Extension(
            f"avagrad.optim.backends.{name}",
            [SOURCE],
            define_macros=[("NAME", f'"{name}"'), ("INIT", f"PyInit_{name}"), ("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=FLAGS + flags,
            extra_link_args=["-fopenmp"],
            py_limited_api=True,
            optional=True,
        )
        for name, flags in variants.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
