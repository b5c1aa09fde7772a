"""Arguments of a pass: tables of 64-bit integers, most of them addresses; here are their places."""

from __future__ import annotations

from card.kernels.jit.vectors import GROUP, compiled, load_float, load_int

# Places in the entry of a linear layer: what multiplies by it, its panels and the bytes of each, a scale and a bias for
# each output channel, and which activations it takes: AS_BYTES or AS_FLOATS.
MULTIPLIER, PANELS, PANEL_BYTES, CHANNEL_SCALES, BIASES, TAKES, LINEAR_SIZE = range(7)
AS_BYTES, AS_FLOATS = 1, 2  # added where activations are needed as both
# Places in the table of a pass.
(
    ROWS, THREADS, LAYERS, WIDTH, PADDED_WIDTH, VOCAB, LAYER_TABLE, NORM, EPS, SCORE_CAP, LOGIT_CAP, ACTIVATION,
    CENTRES, IS_PARALLEL, HAS_WIDE_NORMS, ROW_TABLE, ANCESTORS, HIDDEN, ADDED, PROJECTED, ATTENDED, GATED,
    GATED_SCALES, GATED_SUMS, OWN, OWN_BYTES, BARRIER, CHOSEN_ROWS, NUM_CHOSEN, LOGITS, KV_BYTES, INPUTS, INPUT_SIZE,
    ROUTED, EXPERTS_AT, EXPERTS_READ, STEPS, NUM_STEPS, OWN_WIDTH, PADDED_OWN_WIDTH, TOKEN_INPUTS,
    LAYER_INPUTS, OWN_NORM, EXPERT_SUMS, OUTPUT,
) = range(45)  # fmt: skip
INPUT_PROJECTION = OUTPUT + LINEAR_SIZE
TABLE_SIZE = INPUT_PROJECTION + LINEAR_SIZE
SILU, GELU, CLAMPED = range(3)  # kinds of ACTIVATION
# Places in the table of a layer: its linear layers one after the other, then single entries. SINKS is where a float for
# each query head lies, a score beside those of the positions that has no value (0: none). Those from HEADS on are its
# shape: heads of queries, of keys, channels of each and with its padding, the scale of scores, channels of the MLP
# with their padding. Then where its keys lie, as bytes of a row of the cache that lie before them, and its number among
# the layers that keep keys. A layer with a convolution has PANEL channels in each of as many heads of B, C and u; then
# come its weights, one row for each tap, how many taps, and the bytes of a record that lie before its own. Then the
# address of the table of its experts; 0 for a plain MLP. Then heads of keys that it makes itself, all or 0; the weight
# of the norm of values, where a float lies that its hidden states are times, and the address of the table of the
# numbers that tokens have for it; 0 for none of these.
# Behind queries, keys and values a row has MORE_HEADS of a further linear layer, and room for SPARE_HEADS; OUT_HEADS is
# how many of them the mixer gives. Those of MORE are gates of the attention's heads, if there are any. A layer of the
# delta rule has, in heads of PANEL channels, what its convolution takes in as queries, scores of beta and of the decay
# as keys and values, and gates of the output as MORE. Then come how many heads there are of keys (KEY_SIZE channels;
# 0 for other layers) and of values, whether value heads that share a key are apart, the bytes of a state that lie
# before its own, and the addresses of its rates, of what is added to the scores of the decay, of its norm, and of the
# machine code of `gated_delta.advance_states`. Then where a float for each position lies that queries are times (0:
# none), whether heads turn before they are normed, and whether heads are added to what lies in PROJECTED.
QUERY, KEY, VALUE, ATTENTION_OUT, GATE, UP, DOWN, MORE = range(0, 8 * LINEAR_SIZE, LINEAR_SIZE)
(
    INPUT_NORM, QUERY_NORM, KEY_NORM, ATTENTION_OUT_NORM, MLP_NORM, MLP_OUT_NORM, COS, SIN, TURNED, WINDOW, COPY_TO,
    SINKS, HEADS, KV_HEADS, HEAD, PADDED_HEAD, SCALE, MLP, KV_AT, KV_LAYER, FILTER, NUM_TAPS, RECORD_AT, EXPERTS,
    MADE_KV_HEADS, VALUE_NORM, FACTOR, OWN_INPUT, MORE_HEADS, SPARE_HEADS, OUT_HEADS, KEY_HEADS, VALUE_HEADS, KEY_SIZE,
    VALUE_SIZE, IS_TILED, STATE_AT, RATES, STEP_BIASES, OUT_NORM, STATES_CODE,
    QUERY_GROWTH, TURNS_FIRST, ADDS_HEADS, LAYER_SIZE,
) = range(8 * LINEAR_SIZE, 8 * LINEAR_SIZE + 45)  # fmt: skip
# Places in the table of numbers that tokens have for a layer: two linear layers, what makes a gate of hidden states and
# what those behind the gate give, the weight of the norm of the latter, where a factor of hidden states lies that takes
# the place of the layer's, and the bytes of a row of all layers' numbers that lie before these.
INPUT_GATE, INPUT_OUT = 0, LINEAR_SIZE
INPUT_OUT_NORM, INPUT_FACTOR, INPUT_AT, OWN_INPUT_SIZE = range(2 * LINEAR_SIZE, 2 * LINEAR_SIZE + 4)
# Places in the table of a layer's experts: how many a row chooses from and how many of them it takes, whether weights
# are over the sum of the chosen ones', what they are times, NO_SHARED, PLAIN_SHARED or GATED_SHARED, and which
# activations the experts take. Where they stand beside an MLP: the weights of the norms of what the router reads, of
# what the experts read, of what the MLP gives and of what they give; 0 elsewhere. Where factors of the experts' weights
# lie; 0 for none. Then whether scores are sigmoids instead of a softmax, where a float for each expert lies that is
# added to them for the choice alone (0: none), and what is added to their sum. Then the address of the machine code of
# `experts.run_experts`. Then the router, whose last channel is the gate of a shared expert, and the experts, the shared
# one last: three linear layers each, and groups of channels of the first two.
(
    NUM_EXPERTS, CHOSEN_EXPERTS, IS_NORMED, WEIGHT_SCALE, SHARED, EXPERT_TAKES, ROUTER_NORM, EXPERT_NORM,
    MLP_ALONE_NORM, EXPERTS_OUT_NORM, EXPERT_FACTORS, HAS_SIGMOIDS, EXPERT_BIASES, SUM_OFFSET,
    EXPERT_CODE, ROUTER,
) = range(16)  # fmt: skip
NO_SHARED, PLAIN_SHARED, GATED_SHARED = range(3)
EXPERT_LIST = ROUTER + LINEAR_SIZE
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN, EXPERT_GROUPS = range(0, 4 * LINEAR_SIZE, LINEAR_SIZE)
EXPERT_SIZE = EXPERT_GROUPS + 1
# Places in the table of a row: where its sequence's part of the cache is, and for how many rows it has room; its own
# row there, its position, the row of its angles in COS and SIN, how many of the first rows it sees, and the first
# of its other ancestors. Then the rows that layers without a window read, for each layer and KV head (0: all), how
# many, and from which row on they read all; where the scores of the rows go (0: nowhere), how many there are for each
# query head, and what they are: logits, weights, or instead of scores the queries.
(
    KV, ROOM, SLOT, POSITION, ANGLE, PREFIX, FIRST_ANCESTOR, PICKED, NUM_PICKED, SINCE, SCORES, NUM_SCORES, SCORE_KIND,
    ROW_SIZE,
) = range(14)  # fmt: skip
# Places in the table of what convolutions of a row take in, which is there if a layer has one: where the record of the
# row is kept for rows of later passes, and where as a landmark (0: nowhere). Then the records of its last ancestors,
# oldest first: an address, -1 - a row of this pass, or 0 before the text.
RECENT, LANDMARK, FIRST_SOURCE = range(3)
# Places in the table of a step that states of the delta rule take: the row that advances one, or the record that is
# repeated (0: the row advances); the states before and behind it, a number of a place of the thread or an address of
# all states of a sequence; and where a copy goes (0: nowhere).
STEP_ROW, STEP_RECORD, STEP_FROM, STEP_TO, STEP_MARK, STEP_SIZE = range(6)
LOGITS_OF_ROWS, WEIGHTS_OF_ROWS, QUERIES = range(3)
TOGETHER = 32  # queries whose scores are kept at once, or as many as a row has for a KV head


@compiled
def entry(table: int, place: int) -> int:
    """Return what a table holds at a place."""
    return load_int(table + 8 * place)


@compiled
def real_entry(table: int, place: int) -> float:
    """Return the float32 that a table holds at a place."""
    return load_float(table + 8 * place)


@compiled
def layer_entry(table: int, layer: int) -> int:
    """Return the address of a layer's table."""
    return entry(table, LAYER_TABLE) + 8 * LAYER_SIZE * layer


@compiled
def row_entry(table: int, row: int) -> int:
    """Return the address of a row's table."""
    return entry(table, ROW_TABLE) + 8 * ROW_SIZE * row


@compiled
def input_entry(table: int, row: int) -> int:
    """Return the address of the table of what convolutions of a row take in."""
    return entry(table, INPUTS) + 8 * entry(table, INPUT_SIZE) * row


@compiled
def sources_of(table: int, row: int) -> int:
    """Return where a row's table names the records of its ancestors."""
    return input_entry(table, row) + 8 * FIRST_SOURCE


@compiled
def all_heads(of: int) -> int:
    """Return how many heads a layer has of a row, by its table: queries, keys, values and those behind them."""
    return entry(of, HEADS) + 2 * entry(of, KV_HEADS) + entry(of, MORE_HEADS) + entry(of, SPARE_HEADS)


@compiled
def attended_bytes(of: int) -> int:
    """Return the bytes of a row of what attention gives in a layer: whole groups of floats."""
    return (4 * entry(of, OUT_HEADS) * entry(of, PADDED_HEAD) + 4 * GROUP - 1) // (4 * GROUP) * (4 * GROUP)


@compiled
def kept_bytes(table: int, of: int) -> int:
    """Return the bytes of one head of a row in the cache, in a layer whose table is ``of``."""
    return entry(of, PADDED_HEAD) * entry(table, KV_BYTES)


@compiled
def kept_at(table: int, of: int, its: int, head: int) -> int:
    """Return where a sequence's rows of a head lie in the cache; the keys of a layer first, then the values.

    The layers lie one after the other, each [2, KV heads, room, channels].

    Args:
        of, its: the tables of the layer, and of a row.
    """
    return entry(its, KV) + entry(its, ROOM) * (entry(of, KV_AT) + head * kept_bytes(table, of))
