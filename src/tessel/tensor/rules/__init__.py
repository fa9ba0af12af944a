"""The rules of the table, by kind: what torch's functions do with spread tensors.

It may import the modules of `tensor` that rules are written with (`table`, `tensor`, `use`,
`windowed` and others), and packages below `tensor`. `tensor.call` imports all rules, so no rule may
import it.
"""
