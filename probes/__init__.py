"""One module for each probe: run(handles, config, progress) -> Report, with a Config and a Result of its own.

A new probe is a module here with CONFIG, RESULT and run, and a line in PROBES.
"""

PROBES = {"lens": "probes.logit_lens"}  # name -> module, imported when it is needed
