"""The check of a conversion: a user's own model in one process, and over workers.

`check.py` runs the steps; each other file is one noun of it. The *arguments* of the model go
through its *runs*, in one process and converted, module by module; each difference is in the
*report*. It may import what `testing` may.
"""

from tessel.testing.model.check import check_model as check_model
from tessel.testing.model.report import ModelReport as ModelReport
