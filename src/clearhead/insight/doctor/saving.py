"""Saving and moving: names in the state_dict that will not load again, and tensors that .to(device) leaves behind."""

from torch import Tensor, nn

from clearhead.insight.doctor.report import Finding, listed

NAME = "saving"


def check_saving(module: nn.Module) -> list[Finding]:
    findings = []
    compiled = [name for name in module.state_dict() if "_orig_mod." in name]
    if compiled:
        text = f"names in the state_dict have _orig_mod. ({listed(compiled, 1)}) and do not load without torch.compile"
        findings.append(Finding(NAME, "warning", f"{text}; use model.compile(), or save model._orig_mod.state_dict()"))
    plain = plain_tensors(module)
    if plain:
        text = f"{listed(plain)} is neither parameter nor buffer: not saved, and left behind by .to(device)"
        findings.append(Finding(NAME, "warning", f"{text}; register_buffer() it"))
    return findings or [
        Finding(NAME, "fine", "no _orig_mod. in its names, no tensor outside of parameters and buffers")
    ]


def plain_tensors(module: nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
    ]
