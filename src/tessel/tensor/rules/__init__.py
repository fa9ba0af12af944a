"""The rules of the table, by kind: how torch's functions compute with spread tensors.

It may import the modules of `tensor` on which rules are built (`table`, `tensor`, `windowed` and
others), and packages below `tensor`. `tensor.call` imports all rules, so no rule may import it.
"""
