"""An edited log, made to follow again: what still can happen is kept, and numbered anew. Pure.

    rerun = Rerun(config, log)         a log, of which all but the last event can be folded
    rerun.play(edited)                 `log` with events changed, or None where they are gone

Each event is fitted to the state that the events before it really led to: its columns go where what
they name is gone, and it goes with its last column. So whatever is left out takes along all that it
led to. Epochs, copies, steps, acknowledgements, table entries and starts count up without a gap
again, or the fold would refuse the rest. The last event is not fitted if it could not be folded:
its numbers keep their distance to those of the state, for that distance may be the fault.
"""

from hisparse.fsm.rerun.play import Played, Rerun

__all__ = ["Played", "Rerun"]
