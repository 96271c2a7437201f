"""The lab: claims about attention, each tested by an experiment with a verdict and a figure.

clearhead.lab.run("scaled-key", alpha=3).verdict
"""

from clearhead.lab.claim import Claim as Claim
from clearhead.lab.claim import Result as Result
from clearhead.lab.registry import find as find
from clearhead.lab.registry import run as run
