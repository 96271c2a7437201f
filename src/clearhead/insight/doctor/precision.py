"""Precision: the module in other dtypes. What is hard-coded inside breaks, or quietly turns everything into float32."""

from dataclasses import replace

import torch

from clearhead.insight.doctor.calling import Called, said
from clearhead.insight.doctor.feeds import Images
from clearhead.insight.doctor.report import Finding, Verdict
from clearhead.insight.doctor.subject import copied

NAME = "dtype"
NOT_OURS = ("not implemented for", "not supported")
"""what a CPU says of operations that it lacks"""


def check_precision(called: Called) -> list[Finding]:
    findings = []
    if called.breaks_in_float64:
        text = f"breaks in float64: {called.breaks_in_float64}; take dtypes from the tensors that come in"
        findings.append(Finding(NAME, "warning", text))
    for dtype in (torch.bfloat16, torch.float16):
        found = of_dtype(called, dtype)
        if found is not None:
            findings.append(found)
    return findings or [Finding(NAME, "fine", "float64, bfloat16 and float16 go in and come out")]


def of_dtype(called: Called, dtype: torch.dtype) -> Finding | None:
    subject = called.subject
    name = str(dtype).removeprefix("torch.")
    twin = replace(subject, model=copied(subject.model).to(dtype), dtype=dtype)
    try:
        output = twin.answer(twin.draw(0))
    except Exception as error:
        if any(words in str(error) for words in NOT_OURS):
            return None
        what = said(error)
        return Finding(
            NAME, "warning", f"breaks in {name}: {what}; make masks and buffers in the dtype of what comes in"
        )
    if output.dtype != dtype:
        came = str(output.dtype).removeprefix("torch.")
        text = (
            f"{name} becomes {came} inside: on purpose for logits, else a hard-coded dtype that doubles time and memory"
        )
        return Finding(NAME, "warning", text)
    has_images = any(isinstance(feed, Images) for feed in subject.plan.feeds.values())
    if not output.isfinite().all() and subject.answer(subject.draw(0)).isfinite().all() and not has_images:
        text = f"in {name} the answer is not finite: a number is too large for it, such as -1e9 as a mask"
        verdict: Verdict = "fault" if dtype == called.own_dtype else "warning"
        return Finding(NAME, verdict, f"{text}; use torch.finfo(dtype).min or a bool mask")
    return None
