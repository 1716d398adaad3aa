"""The reference of the probes of layers and of the memory."""

from __future__ import annotations

from engram_lab.lab.fronts.entry import CKA, ENGRAM, HSIC, LOGIT_LENS, TUNED_LENS, UNBIASED, Entry

LAYERS = {
    "lens": Entry(
        page="lens",
        asks="What would each layer predict if it were the last, and from which layer on does the prediction stand?",
        formula=(
            r"\mathrm{KL}(p_\text{final} \,\|\, p_\text{layer}) = \sum_{v} p_\text{final}(v)\,"
            r"\ln\frac{p_\text{final}(v)}{p_\text{layer}(v)}\ \text{nats},"
            r"\qquad p_\text{layer} = \mathrm{softmax}\big(W_U\,\mathrm{norm}(h_\text{layer})\big)"
            r"\ \text{or, tuned,}\ \mathrm{softmax}\big(W_U\,\mathrm{norm}"
            r"(h_\text{layer} + A_\text{layer} h_\text{layer} + b_\text{layer})\big)"
        ),
        symbols=(
            (r"h_\text{layer}", "the residual stream after a block; `embed` is before block 0", ""),
            (r"\mathrm{norm},\ W_U", "the model's own final norm and output matrix", ""),
            (r"p_\text{layer}", "the distribution of the next token, read at a layer, in float32", "probability"),
            (r"p_\text{final}", "the model's own: that of the last layer", "probability"),
            (r"A_\text{layer},\ b_\text{layer}", "the translator of the tuned lens, fitted for each layer", ""),
            ("v", "a token of the vocabulary", ""),
        ),
        meaning=r"""
$h_\text{layer}$ is the residual stream after the block (`embed`: before block 0), read through the model's own final
norm and output matrix $W_U$, in float32. The last layer is the model's own prediction, so its KL is exactly 0.
The **tuned lens** ([Belrose et al.](https://arxiv.org/abs/2303.08112)) puts an affine translator before that, one for
each layer but the last: it starts at zero and is fitted to the least KL on other text (`engram-lab lens fit`). Where
the logit lens is far off and the tuned lens near, the layer held the prediction in a basis of its own. KL is relative
to the final prediction, so models of different **final entropy** are compared with care.
**Entropy** is that of $p_\text{layer}$. **Settle depth** is the first layer from which on the top token stays the
final one, counted from embed = 0. **Rank** counts the tokens with a larger logit, so 0 is the top. Means are over all
positions but a leading special token, which stands for no text. 95 % intervals are percentiles of a bootstrap over
texts, drawn whole; for a difference in pairs.
""",
        sources=(LOGIT_LENS, TUNED_LENS, ENGRAM),
        controls="The last layer, whose logits are bit for bit the model's; the tuned lens, which tells a basis of its "
        "own from a prediction that is not there yet; a twin at equal tokens, and one at equal held-out loss.",
        not_shown="that later blocks use what a layer holds: a lens reads, it does not intervene. A small KL means "
        "near to this model's own prediction, right or wrong. The raw lens reads each layer in the basis of the last "
        "one, so that a lower curve need not be a deeper layer; a tuned lens may find what the model "
        "itself does not use.",
        example='--model engram-mini --against dense-mini --tuned --prompt "The capital of the United" --json -',
    ),
    "cka": Entry(
        page="cka",
        asks="Which layer of one model looks like which layer of another, and is one of them deeper for it?",
        formula=(
            r"\mathrm{CKA}(X, Y) = \frac{\mathrm{HSIC}_1(X, Y)}{\sqrt{\mathrm{HSIC}_1(X, X)\,\mathrm{HSIC}_1(Y, Y)}},"
            r"\qquad n(n-3)\,\mathrm{HSIC}_1 = \lVert X^\top Y\rVert_F^2 - \frac{n}{n-2}\sum_i |x_i|^2 |y_i|^2"
            r" + \frac{\sum_i |x_i|^2\,\sum_i |y_i|^2}{(n-1)(n-2)}"
        ),
        symbols=(
            ("X,\\ Y", "residual streams of a layer of either model at the same points, centred", ""),
            ("x_i,\\ y_i", "their rows: one point", ""),
            ("n", "points", ""),
            (
                r"\mathrm{HSIC}_1",
                "the unbiased estimator of how far similar points in one are similar in the other",
                "",
            ),
            (r"\mathrm{CKA}", "similarity", "1 at most, 0 for unrelated, a little below by chance"),
        ),
        meaning=r"""
$X$ and $Y$ are the residual streams of a layer of either model at the same $n$ points, centred; HSIC$_1$ is the
unbiased estimator of Song et al. (2012), so unrelated layers score 0 whatever their width, and a little below it by
chance. The **biased** value, $\lVert X^\top Y\rVert_F^2 / (\lVert X^\top X\rVert_F \lVert Y^\top Y\rVert_F)$, is what
much of the literature prints; it is too high for few points. **Soft alignment** of a layer is the CKA-weighted mean of
the block numbers of its 5 most similar layers in the other model (`embed` is -1); a negative CKA has no weight there.
A mean of 5 is pulled towards the middle at either end, also for a model with itself. **Lead** is half of A's layer in B
minus B's same layer in A, in which that pull cancels. 95 % intervals are percentiles over resamples of the sentences,
drawn whole and with replacement; each HSIC follows the sentences' shares in it, to first order, because an unbiased
estimator must not pair a sentence with its own copy. Positions are matched by the text in front of them.
""",
        sources=(CKA, HSIC, UNBIASED, ENGRAM),
        controls="A model with itself, which shows how far a mean of 5 is pulled to the middle; the biased values; "
        "intervals over sentences; the logit lens of the same pair on the same sentences, beside it.",
        not_shown="that two layers compute the same: it is blind to rotation and scale, and the few directions in "
        "which points differ most decide it. It compares, and says nothing of cause. Depth that is read off it is a "
        "likeness between two models on one set of points.",
        example="--model engram-mini --against dense-mini --max-sentences 100 --json -",
    ),
    "gates": Entry(
        page="gates",
        asks="At which tokens does the memory open, what comes through, and is anything lost without it?",
        formula=(
            r"g = \text{gate}\Big(\frac{\langle \mathrm{RMSNorm}(W_K e),\ \mathrm{RMSNorm}(h)\rangle}{\sqrt d}\Big),"
            r"\qquad\text{written} = g\,W_V e + \mathrm{SiLU}(\mathrm{conv}(\mathrm{RMSNorm}(g\,W_V e))),\qquad"
            r"\text{logit}_v = \sum_\text{parts}"
            r"\frac{\langle \text{part},\ \gamma \odot W_U[v]\rangle}{\mathrm{rms}(h_\text{last})}"
        ),
        symbols=(
            ("g", "the gate of a token at a memory layer", "0 (shut) to 1 (open)"),
            (r"\text{gate}(s)", r"as the checkpoint has it: $\sigma(s)$, or $\sigma(\pm\sqrt{\lvert s\rvert})$", ""),
            ("e", "the rows that the n-grams ending at the token read, one behind the other", ""),
            ("h", "the residual stream there, before the memory adds to it", ""),
            ("d", "its width", ""),
            ("W_K,\\ W_V", "the memory's matrices for keys and values", ""),
            (r"\text{written}", "what the memory adds to the residual stream", "its length is charted"),
            (r"\gamma,\ W_U", "weight of the final norm, output matrix", ""),
            (r"h_\text{last}", "the residual after the last block: the sum of all parts", ""),
        ),
        meaning=r"""
$e$ is what the n-grams that end at a token read, $h$ the residual stream there. With norm weights of 1 no gate can
open further than the **ceiling**, as $|s| \le \sqrt d$; learned weights allow $|s| \le \sqrt d\,\max|w_K w_Q|$.
**Attribution** splits a logit exactly: the final norm divides all parts of the last residual by one number, which is
kept as it was. All tokens share a constant in their logits, so read a share beside the others. A **knock-out** shuts
one gate at one position and layer, for the token itself and for those behind it; what it changes at the chosen
position is shown, each from a forward of its own. It is not the attribution: later layers answer to what is missing.
**Rows shuffled** gives each head another of its own rows, by one permutation drawn with the seed; **rows zeroed** and
**memory off** leave the same model, by construction, and differ in the gate alone (a zero row has a score of 0);
**one row** cuts each head's table to its first. **Rank correlation** is Spearman's, of the gate over positions.
Means are over all positions but a leading special token; 95 % intervals are percentiles of a bootstrap over texts.
""",
        sources=(ENGRAM,),
        controls="Rows shuffled, rows zeroed, tables of one row, memory off, each in all memory layers or in one; "
        "knock-outs beside the attribution.",
        not_shown="that an open gate helps: it opens on wrong rows too. Attribution follows the direct path alone, and "
        "what later blocks make of the memory is not in it. A knock-out shuts one gate at a time, so that two which "
        "stand in for each other both look idle.",
        example='--model engram-mini --prompt "The president of the United" --control off@6 --json -',
    ),
    "rows": Entry(
        page="rows",
        asks="Which rows does an n-gram read, who else reads them, and which tokens do they promote?",
        formula=(
            r"r_{n,k} = \Big(\bigoplus_{j<n} x_{t-j}\, m_j\Big) \bmod p_{n,k}, \qquad"
            r"\text{says}(r) = W_U\,\frac{\gamma \odot W_V^{(n,k)}\,r}{\mathrm{rms}(h_\text{final})}, \qquad"
            r"\mathbb{E}[\text{coverage}] = 1-\Big(1-\tfrac1M\Big)^{N}, \quad"
            r"\mathbb{E}[\text{collisions}] = 1-\Big(1-\tfrac1M\Big)^{N-1}"
        ),
        symbols=(
            ("n,\\ k", "order of the n-gram (2, 3, …) and head", ""),
            ("x_t", "canonical id of the token at position $t$", ""),
            ("m_j", "odd multiplier of the layer for the token $j$ before", ""),
            ("p_{n,k}", "rows of a head, a prime", ""),
            ("r", "a row: its number at the left, its vector where it says something", ""),
            (r"W_V^{(n,k)}", "the head's slice of the value matrix", ""),
            (r"\text{says}", "what the row adds to each token's logit, gate fully open", "logits"),
            ("N,\\ M", "distinct n-grams of a text, rows of the head", ""),
        ),
        meaning=r"""
$x$ are canonical ids, $m_j$ the layer's multipliers, $p$ the rows of a head. A row **says** what it adds to the logits
on the direct path, through its slice of $W_V$, the final norm (weight $\gamma$, at its scale at this position) and
$W_U$, with the gate fully open, less the mean over the vocabulary. **What came through** is the sum of all rows times
the gate, without the convolution. What later blocks make of it is not in it. **Hits** count reads, one for each
position whose n-gram addresses the row; **shared with** are the other distinct n-grams of the text that address it.
For $N$ distinct n-grams and $M$ rows, **even hashing** lets each draw a row evenly and independently; the standard
deviations are exact for that. **Spread** is the variance of the n-grams a row over their mean, 1 under even hashing.
All heads of one order share one mix, so their deviations are not independent.
""",
        sources=(ENGRAM,),
        controls="Even hashing, with its standard deviation; the counts over the training text beside yours.",
        not_shown="what the model makes of a row: later blocks, the convolution and the gate of another prompt are not "
        "in what it says. One row is one of many addends. That two n-grams share a row of one head does not mix them "
        "up, as they hardly share those of the other heads.",
        example='--model engram-mini --prompt "The president of the United" --layer 6 --json -',
    ),
    "sensitivity": Entry(
        page="sensitivity",
        asks="Which texts need the memory: facts, or what can be read off the page?",
        formula=(
            r"\mathrm{change} = \ell_\text{changed} - \ell_\text{as it is},"
            r"\qquad \ell = -\tfrac1T\sum_t \ln p(x_t\mid x_{<t})"
        ),
        symbols=(
            (r"\ell", "loss over the tokens that are scored", "nats a token"),
            ("T", "their number: those of the answers, or all where a text has no answer", ""),
            ("x_t", "a token of the text", ""),
            (r"\mathrm{change}", "what the change of the memory costs; above 0 the memory is needed", "nats a token"),
        ),
        meaning=r"""
$\ell$ runs over the tokens of the answers (over all tokens where a text has none), in nats a token. **Off** forces the
gate to 0; **zeroed** rows give a value of 0 whatever the gate says, so the two have the same loss by construction.
**Shuffled**: each head reads another row of its own table. **One row**: every n-gram reads the first row of its head.
The **contrast** is the change on the first set minus that on another. 95 % intervals are percentiles of a bootstrap
over items, each set by itself; for changes in pairs. With few items of one answer token each the intervals are wide.
""",
        sources=(ENGRAM,),
        controls="Rows zeroed, which must cost what memory off does; rows shuffled and tables of one row; each memory "
        "layer by itself; the dense twin on the same tokens.",
        not_shown="how good a model without memory would be: this one was trained with it, and is deprived of it. A "
        "set stands for its kind of text only as far as its items do, and nothing here says where in the tables a "
        "fact is.",
        example="--model engram-mini --against dense-mini --control off --control shuffled --json -",
    ),
}
