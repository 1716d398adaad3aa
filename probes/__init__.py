"""One module for each probe: run(handles, config, progress) -> Report, with a Config and a Result of its own.

A new probe is a module here with CONFIG, RESULT and run, and a line in PROBES.
"""

PROBES = {  # name -> module, imported when it is needed
    "lens": "engram_lab.probes.logit_lens",
    "gates": "engram_lab.probes.gates",
    "rows": "engram_lab.probes.rows",
    "sensitivity": "engram_lab.probes.sensitivity",
    "cka": "engram_lab.probes.cka",
    "kv swap": "engram_lab.probes.kv.swap",
    "kv map": "engram_lab.probes.kv.map",
    "kv knockout": "engram_lab.probes.kv.knockout",
    "kv erratum": "engram_lab.probes.kv.erratum",
    "kv reasoning": "engram_lab.probes.kv.reasoning",
    "kv compose": "engram_lab.probes.kv.compose",
    "kv set": "engram_lab.probes.kv.set",
    "facts check": "engram_lab.probes.facts.check",
    "facts layers": "engram_lab.probes.facts.layers",
    "facts density": "engram_lab.probes.facts.density",
    "facts alternatives": "engram_lab.probes.facts.alternatives",
}
