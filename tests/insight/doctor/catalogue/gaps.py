"""What the doctor does not find yet, and whom it blames in error. These lists may only shrink."""

NOT_NAMED: list[str] = []
"""planted faults with a finding of another check, or without the word that names the cause"""

MISSED: list[str] = []
"""planted faults without any finding"""

FALSE_ALARMS: list[str] = []
"""right modules with a finding, or that cannot be called"""
