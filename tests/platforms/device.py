"""An imitation of a GPU without float64, such as MPS, the GPU of a Mac: CPU tensors in a wrapper that says otherwise.

As on MPS, float64 on the device and operations on tensors of two devices are errors. `install()` cannot be undone: it
is for a process of its own.
"""

import warnings

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "nodouble"
aten = torch.ops.aten


class DeviceTensor(Tensor):
    """A CPU tensor that says that it is on the device."""

    @staticmethod
    def __new__(cls, real: Tensor) -> "DeviceTensor":
        if real.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device(NAME, 0),
            requires_grad=real.requires_grad,
        )

    def __init__(self, real: Tensor):
        self.real_tensor = real.detach()

    def __repr__(self) -> str:
        return f"DeviceTensor({self.real_tensor})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class ImitatedDevice(TorchDispatchMode):
    """Catches what creates tensors on the device, too. `n_operations` proves that it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.n_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, _ = tree_flatten((args, kwargs or {}))
        self.n_operations += any(isinstance(one, DeviceTensor) for one in flat)
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    flat, _ = tree_flatten((args, kwargs))
    tensors = [one for one in flat if isinstance(one, Tensor)]
    on_device = [one for one in tensors if isinstance(one, DeviceTensor)]
    target = kwargs.get("device")
    target = target and torch.device(target)
    copies = func in (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default)
    if on_device and not copies:
        others = [one for one in tensors if not isinstance(one, DeviceTensor) and one.dim()]
        assert not others, f"{func} got tensors of two devices"
    if func is aten._to_copy.default and on_device and kwargs.get("dtype") is torch.float64:
        raise TypeError("the device has no float64")  # even if it goes to the CPU
    stays = target.type == NAME if target else bool(on_device)
    kwargs = dict(kwargs)
    if target and target.type == NAME:
        kwargs["device"] = torch.device("cpu")
        if func is aten._to_copy.default:
            kwargs.pop("non_blocking", None)
    before = {id(one.real_tensor): one for one in on_device}
    real = tree_map(lambda one: one.real_tensor if isinstance(one, DeviceTensor) else one, (args, kwargs))
    result = func(*real[0], **real[1])
    given = {id(one): one for one in tensors}

    def wrap(one):
        if not isinstance(one, Tensor) or id(one) in given:
            return one
        if id(one) in before:
            return before[id(one)]
        return DeviceTensor(one) if stays else one.clone() if on_device and func is aten._to_copy.default else one

    if func is aten.copy_.default:
        return args[0]
    return tree_map(wrap, result)


def install() -> None:
    """The device exists from now on, in this process: `torch.zeros(2, device="nodouble")`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
