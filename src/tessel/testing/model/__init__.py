"""The check of a conversion: a user's model in one process, and over workers.

`check.py` runs the steps. The *arguments* of the model are passed to its *runs*, in one process and
converted, which are compared module by module; each difference is in the *report*. It may import
what `testing` may.
"""

from tessel.testing.model.check import check_model as check_model
from tessel.testing.model.report import ModelReport as ModelReport
