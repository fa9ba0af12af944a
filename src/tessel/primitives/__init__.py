"""The movements of data between workers, each a thin face of `tessel.Move`."""
