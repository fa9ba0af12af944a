"""The proof of a conversion: a user's own model in one process, and over workers.

`check.py` says in which order; each other file is one noun of it. The *arguments* of the model are
run through it in *one process* and *converted*, *module by module*; each *difference* goes into
the *report*. An *attempt* is what may raise on one worker, and must then raise on all.
"""

from tessel.testing.model.check import check_model as check_model
from tessel.testing.model.report import ModelReport as ModelReport
