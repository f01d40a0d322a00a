"""NumPy, JAX and torch arrays side by side, without loading a framework that the caller has not loaded."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

import numpy as np

INT32 = np.iinfo(np.int32)


def kind_of(x: Any) -> str | None:
    """ "numpy", "jax" (tracers and ShapeDtypeStructs too) or "torch"; None for anything else."""
    if isinstance(x, np.ndarray):
        return "numpy"
    # An array of a framework exists only where its module is loaded.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(
        x, (getattr(jax, "Array", ()), getattr(jax, "ShapeDtypeStruct", ()))
    ):
        return "jax"
    return None


def module(kind: str) -> Any:
    """The module of array functions of one kind."""
    if kind == "numpy":
        return np
    if kind == "jax":
        import jax.numpy as jnp

        return jnp
    import torch

    return torch


def is_traced(x: Any) -> bool:
    """Whether the array has a shape but no values: a JAX tracer, a ShapeDtypeStruct, a fake or meta tensor."""
    kind = kind_of(x)
    if kind == "jax":
        import jax

        return isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))
    if kind == "torch":
        fake = sys.modules.get("torch._subclasses.fake_tensor")
        return x.is_meta or isinstance(x, getattr(fake, "FakeTensor", ()))
    return False


def to_host(name: str, x: Any) -> np.ndarray:
    """The values as a NumPy array; copies from a device. TypeError where there are none to look at."""
    if is_traced(x):
        raise TypeError(
            f"{name} has no values here ({type(x).__name__} of shape {tuple(x.shape)}): "
            f"call this outside jit, grad, vmap and scan"
        )
    if kind_of(x) == "torch":
        x = x.detach().cpu()
        return (x.float() if dtype_name(x) == "bfloat16" else x).numpy()
    return np.asarray(x)


def dtype_name(x: Any) -> str:
    """ "int32", "float32", ... in every framework."""
    return str(x.dtype).removeprefix("torch.")


def full(like: Any, shape: tuple[int, ...], value: float) -> Any:
    """A constant array of `like`'s kind, dtype and device."""
    if kind_of(like) == "torch":
        return like.new_full(shape, value)
    return module(kind_of(like) or "numpy").full(shape, value, dtype=like.dtype)


def concatenate(arrays: list[Any], axis: int = 0) -> Any:
    return module(kind_of(arrays[0]) or "numpy").concatenate(arrays, axis)


def stack(arrays: list[Any]) -> Any:
    """On a new leading axis."""
    return module(kind_of(arrays[0]) or "numpy").stack(arrays)


def where(condition: Any, x: Any, other: float) -> Any:
    """x or a number, in x's dtype."""
    return module(kind_of(x) or "numpy").where(condition, x, other)


def arange(like: Any, n: int) -> Any:
    """int32 0 to n - 1, where `like` is."""
    if kind_of(like) == "torch":
        import torch

        return torch.arange(n, dtype=torch.int32, device=like.device)
    return module(kind_of(like) or "numpy").arange(n, dtype=np.int32)


def comparable(x: Any) -> Any:
    """Integers of a dtype that holds any int32 to compare with, and that torch can compare at all."""
    if kind_of(x) == "torch":
        return x.long()
    return as_int32(x) if x.dtype.itemsize < 4 else x


def as_int32(x: Any) -> Any:
    """A cast without a check."""
    if kind_of(x) == "torch":
        import torch

        return x.to(torch.int32)
    return x.astype(np.int32)


def gather(x: Any, index: Any, axis: int) -> Any:
    """Entries along `axis` of each batch entry; the index (in range, of x's rank) broadcasts."""
    kind = kind_of(x)
    if kind == "torch":
        import torch

        return torch.take_along_dim(x, index.long(), dim=axis)
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.take_along_axis(x, index, axis=axis, mode="clip")
    return np.take_along_axis(x, index, axis=axis)


def resize_last(x: Any, n: int, fill: float) -> Any:
    """Cuts the last axis to n, or fills it up to n."""
    have = x.shape[-1]
    if n <= have:
        return x[..., :n]
    return concatenate([x, full(x, (*x.shape[:-1], n - have), fill)], -1)


def cumulative_count(flags: Any) -> Any:
    """int32 [..., n + 1] of bool [..., n]: how many are set before each position."""
    if kind_of(flags) == "torch":
        import torch

        counts = torch.cumsum(flags, -1, dtype=torch.int32)
    else:
        counts = module(kind_of(flags) or "numpy").cumsum(flags, -1, dtype=np.int32)
    return concatenate([full(counts, (*counts.shape[:-1], 1), 0), counts], -1)


def is_integer(dtype_name: str) -> bool:
    return dtype_name.startswith(("int", "uint"))


def is_float(dtype_name: str) -> bool:
    return dtype_name.startswith(("float", "bfloat"))


def host_ids(name: str, ids: np.ndarray) -> np.ndarray:
    """NumPy integers as int32; a value outside int32 is an error, never wrapped."""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    if ids.dtype.itemsize > 4 or ids.dtype == np.uint32:
        wrong = (ids > INT32.max) | (ids < INT32.min)
        if wrong.any():
            at = np.argwhere(wrong)[0].tolist()
            raise ValueError(f"{name}{at or ''} is {ids[tuple(at)]}, outside int32")
    return ids.astype(np.int32, copy=False)


def host_floats(name: str, x: np.ndarray) -> np.ndarray:
    """NumPy floats as float32."""
    if not is_float(x.dtype.name):
        raise TypeError(f"{name} must be floats, got {x.dtype}")
    with np.errstate(over="ignore"):
        return x.astype(np.float32, copy=False)


def has_bools(values: list[Any]) -> bool:
    """Whether bools stand among numbers: NumPy would make 0 and 1 of them."""
    return not {bool, np.bool_}.isdisjoint(map(type, values))


def host_integers(name: str, x: Any) -> np.ndarray:
    """A rectangular list of integers."""
    array = _rectangular(name, x)
    if array.size == 0:
        return array.astype(np.int32)  # NumPy's dtype of nothing at all is float64
    values = x
    for _ in range(array.ndim - 1):
        values = chain.from_iterable(values)
    values = list(values)
    if has_bools(values):
        raise TypeError(f"{name} must be integers, got a bool among them")
    if array.dtype.kind not in "iu" and all(isinstance(v, (int, np.integer)) for v in values):
        # Too large for any dtype: NumPy made them floats, or objects.
        n = next(n for n, value in enumerate(values) if not INT32.min <= value <= INT32.max)
        at = [int(i) for i in np.unravel_index(n, array.shape)]
        raise ValueError(f"{name}{at} is {values[n]}, outside int32")
    return array


def host_numbers(name: str, x: Any) -> np.ndarray:
    """A rectangular list of floats, or of ints where floats are meant."""
    array = _rectangular(name, x)
    return array.astype(np.float64) if array.dtype.kind in "iu" or array.size == 0 else array


def _rectangular(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError as error:  # unequal lengths
        raise ValueError(f"{name} must be a rectangular list: {error}") from error


def like(x: np.ndarray, array: Any) -> Any:
    """The NumPy array in the kind and on the device of another."""
    kind = kind_of(array)
    if kind == "torch":
        import torch

        return torch.as_tensor(_writable(x), device=array.device)
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    return x


def to_device(x: Any, device: Any) -> Any:
    """x on a torch device (or its name) or a JAX device or sharding; NumPy joins the device's framework."""
    kind = kind_of(x)
    wanted = "torch" if isinstance(device, str) else type(device).__module__.split(".")[0]
    wanted = "jax" if wanted == "jaxlib" else wanted
    if wanted not in ("jax", "torch") or kind not in ("numpy", wanted):
        raise TypeError(
            f"cannot move {kind} arrays to {device!r}: a torch device or its name takes NumPy arrays "
            f"and torch tensors, a JAX device or Sharding takes NumPy and JAX arrays"
        )
    if wanted == "jax":
        import jax

        return jax.device_put(x, device)
    import torch

    return x.to(device) if kind == "torch" else torch.as_tensor(_writable(x), device=device)


def _writable(x: np.ndarray) -> np.ndarray:
    """torch shares the memory of arrays, but cannot have read-only or reversed ones."""
    x = np.ascontiguousarray(x)
    return x if x.flags.writeable else x.copy()
