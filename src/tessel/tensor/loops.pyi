def moments(x: int, found: int, rows: int, channels: int, length: int, itemsize: int, /) -> None:
    """Write the means and then the variances of all channels to an address.

    Args:
        x: the address of values, (rows, channels, length) one after the other.
        found: the address of twice as many values as there are channels.
        rows, channels, length: how many there are; one row and one value at least.
        itemsize: 4 for float32, 8 for float64.
    """
