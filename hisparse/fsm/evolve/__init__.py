"""evolve(state, event): the one place in which state changes. No decisions are made here.

One module a subject; `fsm.fold` dispatches. A handler checks what the event claims against the
state (epochs, owners, quorum) before it changes anything, and raises when they disagree.
"""
