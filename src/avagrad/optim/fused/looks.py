"""Looks at all tensors before a fused step: are they where the tables say, and where are their gradients?

A step must not write to memory that a parameter has left, nor read a gradient as what it is not. Asked from Python,
these questions cost more than the step itself where tensors are many and small: a microsecond for each. So they are
asked by native code, which reaches torch through its C interface and four of its C++ functions by their names.
:class:`PythonLooks` asks the same where there is no compiler or a name is missing.
"""

import ctypes
import functools
import itertools
import weakref
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor

from avagrad.optim.fused.native import library

__all__ = [
    "DictLook",
    "ListLook",
    "Looks",
    "NativeLooks",
    "PythonLooks",
    "address",
    "lies_as",
    "looks_at",
    "same_layout",
]

State = dict[str, Tensor]
_HAS_CHANGED, _HAS_AN_ODD_GRADIENT = 1, 2  # as in native.c


class Looks(Protocol):
    """What a launch asks of its parameters and their states."""

    def are_as_they_were(self) -> bool:
        """Tell whether parameters and state tensors are the same ones, in the same memory, laid out alike.

        What cannot be seen is who writes to a tensor in place. If so, the parameters that have a gradient are about
        to be written to, and autograd is told.
        """

    def gradients(self) -> Tensor | None:
        """Return what the last look has found: the address of each gradient (int64), 0 for none.

        None if one of them is not laid out as its parameter.
        """


def looks_at(params: Sequence[Tensor], states: Sequence[State], keys: Sequence[str]) -> Looks:
    """Return looks at parameters and the named tensors of their states: native ones where they can be had."""
    functions = _functions()
    return PythonLooks(params, states, keys) if functions is None else NativeLooks(params, states, keys, functions)


def address(x: Tensor) -> int:
    """Return where a tensor is; an empty one is nowhere, and is given an address that is not 0."""
    return x.data_ptr() if x.numel() else 1


def lies_as(g: Tensor, p: Tensor) -> bool:
    """Tell whether a gradient can be read as it lies in memory: a plain tensor, laid out as its parameter.

    >>> p = torch.ones(2)
    >>> lies_as(torch.ones(2), p), lies_as(torch.ones(2).double(), p), lies_as(torch._neg_view(torch.ones(2)), p)
    (True, False, False)
    """
    is_plain = type(g) in (Tensor, torch.nn.Parameter) and g.layout == torch.strided
    is_plain = is_plain and not (g.is_conj() or g.is_neg() or g._is_zerotensor())
    return is_plain and g.dtype == p.dtype and same_layout(g, p)


def same_layout(g: Tensor, p: Tensor) -> bool:
    """Tell whether two tensors lie in memory alike; the stride of a single element means nothing.

    >>> same_layout(torch.ones(2, 3), torch.ones(3, 2).t())
    False
    >>> same_layout(torch.ones(1, 3), torch.ones(3, 1).t())
    True
    """
    if g.shape != p.shape:
        return False
    return g.stride() == p.stride() or all(
        a == b or n <= 1 for a, b, n in zip(g.stride(), p.stride(), p.shape, strict=True)
    )


class PythonLooks:
    """The looks, from Python."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[State], keys: Sequence[str]) -> None:
        self.params, self.states = params, states
        self.kept = [(state, key, state[key]) for state in states for key in keys if key in state]
        self.lay = self._lie()

    def _lie(self) -> list[Any]:
        tensors = [*self.params, *(x for _, _, x in self.kept)]
        return [list(map(of, tensors)) for of in (Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype"))]

    def are_as_they_were(self) -> bool:
        """See :class:`Looks`."""
        if not all(state.get(key) is x for state, key, x in self.kept) or self._lie() != self.lay:
            return False
        torch.autograd.graph.increment_version([p for p in self.params if p.grad is not None])
        return True

    def gradients(self) -> Tensor | None:
        """See :class:`Looks`."""
        grads: list[Tensor | None] = [p.grad for p in self.params]
        if any(g is not None and not lies_as(g, p) for p, g in zip(self.params, grads, strict=True)):
            return None
        return torch.tensor([0 if g is None else address(g) for g in grads], dtype=torch.int64, device="cpu")


class NativeLooks:
    """The looks, by native code; the rows are as ``native.c`` reads them."""

    def __init__(
        self, params: Sequence[Tensor], states: Sequence[State], keys: Sequence[str], functions: "_Functions"
    ) -> None:
        # They are told apart by their addresses, so they are kept alive.
        self.alive = [params, states, [list(state.items()) for state in states]]
        self.code, self.functions = _code(), ctypes.byref(functions)
        of_params, handles = _impls(params)
        _release(handles)  # or their TensorImpls could not be swapped, as Module.to() may do
        of_states, handles = _impls([state[key] for state in states for key in keys if key in state])
        weakref.finalize(self, _release, handles)
        impls = iter(of_states)
        rows: list[int] = []
        layouts: list[int] = []
        for p, state, impl in zip(params, states, of_params, strict=True):
            storage = p.untyped_storage()
            rows += [id(p), impl, storage._cdata, p.data_ptr(), _number_of(p.dtype), len(layouts), id(state)]
            layouts += [p.dim(), *p.shape, *p.stride()]
            its_keys = {key: id(key) for key in state}  # equal strings may be several objects
            for key in keys:
                if key not in state:
                    rows += [0, 0, 0, 0, 0]
                    continue
                storage = state[key].untyped_storage()
                rows += [id(state[key]), next(impls), storage._cdata, storage.data_ptr(), its_keys[key]]
        self.rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.layouts = torch.tensor(layouts, dtype=torch.int64, device="cpu")
        self.addresses, self.seen = (torch.zeros(len(params), dtype=torch.int64, device="cpu") for _ in range(2))
        tables = [ctypes.c_void_p(x.data_ptr()) for x in (self.rows, self.layouts, self.addresses, self.seen)]
        sizes = ctypes.c_int64(len(params)), ctypes.c_int64(len(keys))
        self.arguments = self.functions, tables[0], *sizes, *tables[1:]
        self.found = _HAS_CHANGED

    def are_as_they_were(self) -> bool:
        """See :class:`Looks`."""
        self.found = self.code.avagrad_look(*self.arguments)
        return self.found != _HAS_CHANGED

    def gradients(self) -> Tensor | None:
        """See :class:`Looks`. The tensor is written to again by the next look."""
        return None if self.found == _HAS_AN_ODD_GRADIENT else self.addresses


class DictLook:
    """A look at a dict: does it still hold the same keys and values? By identity; tensors cannot be compared.

    >>> d = {"a": [1]}
    >>> look = DictLook(d)
    >>> look.are_as_they_were(d), look.are_as_they_were({"a": [1]})
    (True, False)
    """

    def __init__(self, objects: dict[Any, Any]) -> None:
        self.items = list(objects.items())
        ids = [id(x) for item in self.items for x in item]
        self.ids = torch.tensor(ids, dtype=torch.int64, device="cpu")

    def are_as_they_were(self, objects: dict[Any, Any]) -> bool:
        """Tell whether the dict holds what it did, in the same order."""
        if (functions := _functions()) is None:
            same = (p is q and s is r for (p, s), (q, r) in zip(self.items, objects.items(), strict=True))
            return len(self.items) == len(objects) and all(same)
        ids, n = ctypes.c_void_p(self.ids.data_ptr()), ctypes.c_int64(len(self.items))
        return bool(_code().avagrad_holds(ctypes.byref(functions), ctypes.c_void_p(id(objects)), ids, n))


class ListLook:
    """A look at a list: does it still hold the same objects? By identity, without touching them.

    >>> x = [torch.ones(2), torch.ones(2)]
    >>> look = ListLook(x)
    >>> look.are_as_they_were(x), look.are_as_they_were(x[:1]), look.are_as_they_were(x[::-1])
    (True, False, False)
    """

    def __init__(self, objects: list[Any]) -> None:
        self.items = list(objects)
        self.ids = torch.tensor([id(x) for x in objects], dtype=torch.int64, device="cpu")

    def are_as_they_were(self, objects: list[Any]) -> bool:
        """Tell whether the list holds what it did, in the same order."""
        if len(objects) != len(self.items):
            return False
        if (functions := _functions()) is None or type(objects) is not list:
            return all(map(is_, objects, self.items))
        ids, n = ctypes.c_void_p(self.ids.data_ptr()), ctypes.c_int64(len(objects))
        return bool(_code().avagrad_lists(ctypes.byref(functions), ctypes.c_void_p(id(objects)), ids, n))


class _Functions(ctypes.Structure):
    """As ``Functions`` in native.c."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "data_ptr", "sizes", "strides", "dim", "dtype", "layout", "is_defined",
            "grad", "is_neg", "is_conj", "bump_version", "dict_next", "list_item",
        )
    ] + [(name, ctypes.c_int64) for name in ("impl_at", "storage_at", "data_at")]  # fmt: skip


@functools.cache
def _functions() -> _Functions | None:
    """Return the functions that native code calls; None if it, or one of them, cannot be had."""
    names = {name: f"aoti_torch_get_{name}" for name in ("data_ptr", "sizes", "strides", "dim", "dtype", "layout")}
    names |= {
        "is_defined": "aoti_torch_is_defined",
        "grad": "_ZNK3c1010TensorImpl4gradEv",  # c10::TensorImpl::grad() const
        "is_neg": "_ZN2at6native6is_negERKNS_6TensorE",  # at::native::is_neg(at::Tensor const&)
        "is_conj": "_ZN2at6native7is_conjERKNS_6TensorE",
        "bump_version": "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    }
    if isinstance(library(), str) or not hasattr(torch._C, "_aoti"):
        return None
    try:
        found = {name: ctypes.cast(_torch(symbol), ctypes.c_void_p) for name, symbol in names.items()}
    except (OSError, AttributeError):
        return None
    for name, symbol in (("dict_next", "PyDict_Next"), ("list_item", "PyList_GetItem")):
        found[name] = ctypes.cast(getattr(ctypes.pythonapi, symbol), ctypes.c_void_p)
    # Where in its memory a tensor has what: nobody promises it, so it is looked for.
    x = torch.zeros(3, device="cpu")
    (impl,), handles = _impls([x])
    _release(handles)
    steps = [id(x), impl, x.untyped_storage()._cdata, x.data_ptr()]
    places = [_place_of(value, address) for address, value in itertools.pairwise(steps)]
    if None in places:
        return None
    return _Functions(**found, **dict(zip(("impl_at", "storage_at", "data_at"), places, strict=True)))


def _place_of(value: int, address: int) -> int | None:
    words = (ctypes.c_int64 * 8).from_address(address)
    return next((8 * i for i, word in enumerate(words) if word == value), None)


def _torch(symbol: str) -> Any:
    return getattr(_torch_library(), symbol)


@functools.cache
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(torch._C.__file__))  # a name is looked for in the libraries that it has loaded, too


@functools.cache
def _code() -> ctypes.PyDLL:
    """Return the library for calls that keep Python's lock: they look into its dicts."""
    code = ctypes.PyDLL(library()._name)
    code.avagrad_holds.restype = code.avagrad_lists.restype = ctypes.c_bool
    return code


@functools.cache
def _number_of(dtype: torch.dtype) -> int:
    return int(_torch(f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")())


def _impls(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the address of each TensorImpl, and handles that keep them alive until they are released."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    handles = [int(get(x, None)) for x in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))]
    return [int(ctypes.c_void_p.from_address(handle).value or 0) for handle in handles], handles


def _release(handles: list[int]) -> None:
    for handle in handles:
        _torch("aoti_torch_delete_tensor_object")(ctypes.c_void_p(handle))
