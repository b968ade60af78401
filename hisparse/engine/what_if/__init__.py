"""What would have happened: the inputs of a recorded run, decided again under a change. No torch.

recording   events in, inputs out: arrivals, token counts, what clients and ranks did, in steps
changes     the same inputs with one dropped or two swapped; configurations to try
replay      those inputs through the production coordinator and serving loop, with no model
figures     what a stream of events amounts to, checked as `hisparse check` checks it
study       a log, its replay under the recorded configuration, and each variant beside them
"""
