"""explore: every interleaving of a small world, through the production `decide` and `evolve`.

world        sizes, and what its requests hold          branch      a scheduler to go on from
canonical    equal up to a renaming                     offers      what can happen next
schedulers   each state of the scheduler, once          search      breadth first, to the end
walk         a path as a log

prepared     a world with copies in flight, and what can come of it alone
projection   what of it is compared        promela, model.pml     the same as a model for Spin
"""

from hisparse.testing.explore.search import Exploration, Found, Search
from hisparse.testing.explore.walk import Walk, walk
from hisparse.testing.explore.world import World

__all__ = ["Exploration", "Found", "Search", "Walk", "World", "walk"]
