"""What each figure of a result is, in words: name -> text. Each probe has its own as DEFINITIONS.

Nothing is imported here: they can be read without torch, which the probes need.
"""

LENS = {
    "kl": "KL(p_final || p_layer) in nats: float32 softmax of the residual after final norm and head.",
    "entropy": "Entropy of the layer's prediction, in nats.",
    "top_ids": "The tokens with the largest logits, equals by rising id.",
    "target_rank": "How many tokens have a larger logit than the target; 0 is top.",
    "settle_depth": "The first layer from which the most likely token stays the final one.",
    "tuned": "The same figures of the residual h after its layer's translator, h + A h + b, fitted on other text.",
    "mean_final_entropy": "Mean entropy of the model's own prediction: KL is relative to it.",
    "next_token_loss": "Cross-entropy of the model's own prediction with the prompt's next token, in nats.",
    "mean": "Means are over all positions of all prompts except a special token that leads a prompt.",
    "interval": "95 % percentile bootstrap over prompts, which are drawn whole; for two models in pairs.",
}
GATES = {
    "gate": "gate(s), s = <RMSNorm(W_K e), RMSNorm(h)> / sqrt(d): how far the memory opens, 0 to 1.",
    "ceiling": "The largest gate at this width if the norms' weights were 1: |s| <= sqrt(d).",
    "ceiling_learned": "The bound with the norms' own weights: |s| <= sqrt(d) max|w_K w_Q|.",
    "written_norm": "Length of what the memory adds to the residual stream.",
    "residual_norm": "Length of the residual stream that the memory reads and adds to.",
    "attribution": "What each part of the last residual gives the target's logit, the final norm's scale kept.",
    "knock_out": "The target's logit with one gate shut at one position minus as it is; below 0 the memory helped.",
    "rank_correlation": "Spearman's correlation over positions of the gate with the control and without.",
    "shuffled": "Each head reads another row of its own table, by one fixed permutation.",
    "zeroed": "Every row read is zero: the gate goes to its value at s = 0, and nothing is written.",
    "one_row": "Every n-gram reads the first row of its head, as if each table had one row.",
    "off": "The gate is 0 and nothing is written: the same logits as zeroed rows, by construction.",
    "mean_kl": "KL(p_final || p_layer) of the logit lens, of the model as it ran: its own final prediction.",
    "mean": "Means are over all positions of all prompts except a special token that leads a prompt.",
    "interval": "95 % percentile bootstrap over prompts, which are drawn whole; for a change in pairs.",
}
ROWS = {
    "row": "The mix of the canonical ids modulo the head's prime: the row within the head.",
    "hits": "How often a row is read over a text, once for each position whose n-gram addresses it.",
    "shared": "The other distinct n-grams of the brought text that address the same row of the same head.",
    "says": "Logits that a row adds on the direct path with the gate fully open, at the final norm's scale at this "
    "position, less their mean over the vocabulary.",
    "came_through": "The same for the sum of all rows of the position, times its gate, without the convolution.",
    "coverage": "Share of a head's rows that the text's n-grams address.",
    "collisions": "Share of the text's distinct n-grams that share their row of the head with another.",
    "spread": "Variance of the distinct n-grams a row over their mean: 1 if they fall evenly, more if they crowd.",
    "expected": "Mean and standard deviation if each distinct n-gram drew its row evenly and independently.",
}
CKA = {
    "cka": "Linear CKA with the unbiased HSIC of Song et al. (2012) over all points; near 0 it can be negative.",
    "biased": "Linear CKA with the biased HSIC, as much of the literature has it: too high for few points.",
    "alignment": "CKA-weighted mean of the block numbers of the other model's 5 most similar layers (embed is -1); a "
    "negative CKA has weight 0.",
    "lead": "Half of (alignment of A's layer in B, minus alignment of B's same layer in A): how many blocks deeper A's "
    "layer looks. The pull of the mean of 5 towards the middle is in both and cancels.",
    "interval": "95 % percentiles over resamples of the sentences, drawn whole and with replacement; each HSIC follows "
    "the sentences' shares in it (first order), as copies of a sentence must not be paired with each other.",
}
SENSITIVITY = {
    "loss": "Cross-entropy in nats a token, over the tokens of the answers (of the whole text where there is none).",
    "change": "Loss with the change minus loss as it is, on the same tokens; above 0 the memory is needed.",
    "contrast": "Change on the first set minus change on this one; above 0 the first set needs the memory more.",
    "top": "Share of items whose answer's first token is the model's most likely one.",
    "interval": "95 % percentile bootstrap over items, drawn whole, each set by itself; for changes in pairs.",
}
EFFECTS = {
    "score": "Logit of the new answer's first token minus that of the old answer's, at the last token.",
    "recovery": "(edited score - old score) / (new score - old score): 0 is the old prompt's run, 1 the new one's.",
    "flip": "Whether the leader of the two answers is another one than in the old prompt's clean run.",
    "cosine": "Cosine of the edited run's logits with the reference's, over the whole vocabulary.",
    "kl": "KL(reference || edited) in nats over the whole vocabulary.",
    "oracle": "The new answer leads the old one in the new prompt's clean run, and the old one in the old prompt's.",
}
SWAP = EFFECTS | {
    "kl": "KL(donor || edited) in nats over the whole vocabulary, donor being the new prompt's clean run.",
    "cosine": "Cosine of the edited run's logits with the donor's, over the whole vocabulary.",
    "best": "The k positions that alone recover most: chosen on the same run, so an upper end and no forecast.",
    "random": "k positions drawn without replacement from those behind the field, several times.",
}
MAP = EFFECTS | {
    "kl": "KL(donor || edited) in nats over the whole vocabulary, donor being the new prompt's clean run.",
    "groups": "Neighbouring layers swapped together, in groups as equal as can be; each layer by itself if 0.",
}
KNOCKOUT = EFFECTS | {
    "margin": "Logit of the right answer's first token minus that of the other answer's; below 0 the answer is wrong.",
    "kl": "KL(clean || knocked out) in nats over the whole vocabulary.",
    "cosine": "Cosine of the knocked-out run's logits with the clean run's, over the whole vocabulary.",
    "kept": "The right answer still leads the other, and is still the most likely token if it was in the clean run.",
    "notes": "Tokens behind the field that are punctuation or a line end and nothing else, or special.",
    "zero": "K and V are 0: the position gets attention as a key of no direction would, and gives nothing.",
    "mean": "K and V are their means over all positions of the cache, keys as cached.",
    "random": "K and V are drawn from normal distributions with the mean and spread of each entry over positions.",
    "unrelated": "K and V of another text at the same positions.",
}
ERRATUM = EFFECTS | {
    "nothing": "The end of the question once more behind the old prompt, with no correction: a control.",
    "new prompt": "The same behind the new prompt's cache: what a full prefill of the corrected prompt would answer.",
    "recovery": "(score - old score) / (new score - old score), the clean runs being of the prompts as they are.",
    "kl": "KL(new prompt's clean run || this run) in nats over the whole vocabulary.",
    "cosine": "Cosine of the run's logits with those of the new prompt's clean run, over the whole vocabulary.",
    "computed": "Tokens that run. A full recompute runs all tokens of the corrected prompt.",
    "served": "Tokens that come from the cache.",
    "right": "The answer that is due has the largest probability of the answers that are compared.",
    "share": "Tokens served from the cache / (served + computed), all corrections so far together.",
}
REASONING = EFFECTS | {
    "recovery": (
        "(score - old score) / (new score - old score), all after as many written tokens, each source having written "
        "its own: 0 is the old prompt's cache after k tokens, 1 the new prompt's. 'direct' is without cue and question."
    ),
    "flip": "Whether the leader of the two answers is another one than from the old cache after as many tokens.",
    "kl": "KL(new || this source) in nats over the whole vocabulary, after as many written tokens.",
    "cosine": "Cosine of the source's logits with those of the new cache after as many tokens.",
    "holds": "After k tokens the old cache still gives the old answer, and the new cache the new one.",
}
COMPOSE = {
    "cosine": "Cosine of the logits at the suffix's last token with those of the full prefill, whole vocabulary.",
    "kl": "KL(full prefill || composed) in nats over the whole vocabulary.",
    "same_top": "The most likely token is that of the full prefill.",
    "same_decision": "The likeliest of the given answers (their first tokens) is that of the full prefill.",
    "computed": "Tokens that run at the time of the request; a full prefill runs all.",
    "seconds": "Rotating the block's keys, splicing, running K tokens of it and the suffix; both caches are there.",
    "full": "A prefill of prefix, block and suffix from nothing.",
    "continued": "A prefill of block and suffix behind the prefix's cache, which needs no composing at all.",
}
SCENARIOS = EFFECTS | {
    "recovery": EFFECTS["recovery"] + " Of swaps.",
    "flip": "Of a swap, whether the new answer takes the lead; of a knock-out, whether the right answer is lost.",
    "lost": "Not kept: " + KNOCKOUT["kept"],
    "notes": KNOCKOUT["notes"],
    "contrast": "Recovery of the field alone minus that of everything behind it; below 0 the claim holds.",
    "interval": "95 % percentile bootstrap over scenarios, drawn whole; for contrasts in pairs. None for a single one.",
}
FACTS = {
    "top-1": "Share of facts whose answer the model says: each token of it is the likeliest, given those before.",
    "top-5": "The same with each token among the five likeliest.",
    "probability": "Mean probability of the whole answer.",
    "efficacy": "Share of facts whose answer's first token is likelier than the rival: the token, other than it, that "
    "was likeliest before writing (ROME's efficacy score; an invented person has no true answer to be the rival).",
    "paraphrase": "Efficacy at other wordings of the facts, each with its own rival.",
    "specificity": "Share of neighbours, prompts about something else with an answer of their own, where that answer's "
    "first token is likelier than the fact's (ROME's neighbourhood score); not told where the two are one token.",
    "same answer": "Share of neighbours whose likeliest next token is the one from before.",
    "interval": "95 % percentile bootstrap over facts, drawn whole with all their items.",
}
LOCALITY = {
    "unaddressed": "Whole texts that read no edited row: every logit is the same.",
    "before": "Positions of a fact's own sentence before it reads an edited row: the same (causality alone does that).",
    "after": "Positions behind the trigger: expected to change, by attention and convolution; measured, not hidden.",
    "aliases": "Other prompts whose last tokens address the very same rows: they change too.",
    "partial": "Texts that read some edited rows without being a trigger: by an n-gram that a fact has too, or because "
    "another n-gram hashes to the same row.",
    "undo table": "SHA-256 of every table, before anything was applied and after everything was removed.",
    "undo logits": "The facts' sentences after all facts were removed, one after another: every logit as before.",
    "undo one fact": "Each fact removed by itself: its trigger's logits are those from before, where it reads no row "
    "that another fact still has.",
    "others stay": "The same overlays at the trigger of the next fact: as with all facts, where it reads none of the "
    "rows that went.",
    "other users": "A batch of this user, nobody, and another user with other vectors in the same rows, at each "
    "prompt in turn: each as in a batch that is all theirs.",
}
CHECK = FACTS | LOCALITY | {
    "gate": "The gate at the trigger's position; the ceiling is sigmoid(d^(1/4)), or sigmoid(sqrt d), "
    "with norm weights of 1, and as the learned weights allow.",
    "cos_value": "Cosine of what the memory writes at the trigger with W_V e: 1 unless the convolution turns it.",
    "cos_output": "Cosine of it with the gradient of the answer's first logit in the last residual, which is the "
    "answer's row of the head seen through the final norm.",
    "composition": "A prompt whose answer needs the fact and another one.",
    "alias top-1": "How often other prompts at a fact's address say its answer: that they do is no success.",
}  # fmt: skip
DENSITY = {
    "top1": "Share of facts whose answer the model says, written with so many others.",
    "free": "The same over facts that share their address with no other answer of their group.",
    "lost_alias": "Facts not said that have an alias: one vector for two answers, not always told apart.",
    "lost_other": "Facts not said that have none.",
    "disjoint": "Two users with half of the facts each, on top of each other.",
    "overlapping": "The second user has the first one's triggers with other answers.",
    "conflicts": "Rows that the two give different vectors; the upper one's is read.",
    "own": "Both in one batch, each prompt with its own user's rows only.",
    "interval": "95 % percentile bootstrap over facts. None for a single one.",
}
ALTERNATIVES = {
    "probability": "Of the whole answer behind the prompt: the product over its tokens.",
    "top1, top5": "Share of prompts where every token of the answer is the likeliest, or among the five likeliest.",
    "gap": "top1 minus that of the rows, on the same prompts.",
    "change": "Loss of unrelated text minus that of the model as it is, in nats a token; signs may cancel.",
    "size": "Mean over tokens of the absolute value of that change.",
    "kl": "KL of the prediction with the method from that of the model as it is, mean over positions, in nats.",
    "changed": "Positions whose logits are not bit for bit those of the model as it is.",
    "more": "size divided by that of the rows; more_kl the same of kl. NaN where the rows change nothing.",
    "bytes": "What is kept for the user: the overlay's file, the adapter's file, the facts as UTF-8 text.",
    "the rows": "Those of the method that was asked for, trained if none was.",
    "interval": "95 % percentile bootstrap over facts with all their prompts, or over unrelated texts; in pairs.",
}
OF = {  # by the name of the probe
    "lens": LENS,
    "gates": GATES,
    "rows": ROWS,
    "sensitivity": SENSITIVITY,
    "cka": CKA,
    "kv swap": SWAP,
    "kv map": MAP,
    "kv knockout": KNOCKOUT,
    "kv erratum": ERRATUM,
    "kv reasoning": REASONING,
    "kv compose": COMPOSE,
    "kv set": SCENARIOS,
    "facts check": CHECK,
    "facts layers": FACTS,
    "facts density": DENSITY,
    "facts alternatives": ALTERNATIVES,
}
