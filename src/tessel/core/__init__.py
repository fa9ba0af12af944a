"""The kernel: where values lie (`Layout`), and what moves them (`Move`), a linear operator.

From the bottom: `boxes` and `windows` are integers only, `partition` and `layout` say who holds
what, `plan` works out the pieces of a movement, and `linop`, `stage` and `move` make it an operator
with an adjoint; `halo` is the other movement there is. It stands on `transport` alone.
"""
