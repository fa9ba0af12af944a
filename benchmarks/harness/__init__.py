"""How claims about speed are measured: cases, contenders that take turns, ratios and verdicts.

Nothing is imported here: `harness.serve` runs in processes that have neither torch nor Tessel.
"""
