"""The power of a module from its rails, by the module's own rule: never a part of it, never 0 for unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping

AGX_ORIN = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
"""No single rail carries an AGX Orin: these three add up (VDDQ_VDD2_1V8AO lies inside VIN_SYS_5V0)."""

INPUT_RAILS = ("VDD_IN", "POM_5V_IN")
"""One rail at the module's input: Orin NX, Orin Nano and older small modules."""


def find_total_rule(names: Collection[str]) -> tuple[str, ...] | None:
    """Which rails make the total, from the rails that a machine has; None when no rule is known for them."""
    for name in INPUT_RAILS:
        if name in names:
            return (name,)
    return AGX_ORIN if all(name in names for name in AGX_ORIN) else None


def module_total(rails_mw: Mapping[str, float], rule: tuple[str, ...] | None = None) -> tuple[float | None, str | None]:
    """Total power in mW and None, or None and the reason.

    ``rule`` is ``BoardSpec.total_rails``; without it the rails themselves tell. A rail of the rule that is missing
    makes the total unknown, and so does a total of 0, which no running module has.
    """
    rule = rule or find_total_rule(rails_mw)
    if rule is None:
        found = ", ".join(rails_mw) or "none"
        return None, f"no rule for the module's total with these rails: {found}"
    missing = [name for name in rule if name not in rails_mw]
    if missing:
        return (
            None,
            f"rail {', '.join(missing)} is missing (found: {', '.join(rails_mw) or 'none'}); is the target right?",
        )
    total = sum(rails_mw[name] for name in rule)
    if total <= 0:
        return None, f"{' + '.join(rule)} read 0 mW, which no running module draws"
    return total, None
