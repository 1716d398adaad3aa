"""One module for each probe: run(handles, config, progress) -> Report, with a Config and a Result of its own.

A new probe is a module here with CONFIG, RESULT and run, and a line in PROBES.
"""

PROBES = {  # name -> module, imported when it is needed
    "lens": "probes.logit_lens",
    "gates": "probes.gates",
    "rows": "probes.rows",
    "sensitivity": "probes.sensitivity",
    "cka": "probes.cka",
    "kv swap": "probes.kv_swap",
    "kv map": "probes.kv_map",
    "kv knockout": "probes.kv_knockout",
    "kv erratum": "probes.kv_erratum",
    "kv reasoning": "probes.kv_reasoning",
    "kv compose": "probes.kv_compose",
    "kv set": "probes.kv_set",
    "facts check": "probes.fact_check",
    "facts layers": "probes.fact_layers",
    "facts density": "probes.fact_density",
    "facts alternatives": "probes.fact_alternatives",
}
