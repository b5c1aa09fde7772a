"""Tables that a pass reads: all numbers are whole, or floats of 32 bits in the lower half; most are addresses."""

from __future__ import annotations

from card.kernels.jit.structs import Struct, address, place

AS_BYTES, AS_FLOATS = 1, 2  # which activations a linear layer takes; added where they are needed as both
SILU, GELU, CLAMPED = range(3)  # kinds of activation
NO_SHARED, PLAIN_SHARED, GATED_SHARED = range(3)  # experts that all rows take
LOGITS_OF_ROWS, WEIGHTS_OF_ROWS, QUERIES = range(3)  # kinds of scores
CACHE_ROWS = 32  # of a block of the cache, side by side: what two texts share is cut to whole blocks
TOGETHER = 48  # queries whose scores are kept at once, or as many as a row has for a KV head


class LinearEntry(Struct):
    """A linear layer."""

    multiplier: int = place("the code that multiplies by it")
    panels: int = place("its weights")
    panel_bytes: int = place("bytes of each panel")
    channel_scales: int = place("a float for each output channel")
    biases: int = place("a float for each output channel")
    takes: int = place("AS_BYTES or AS_FLOATS")
    expands_from: int = place(
        "rows from which on its weights are expanded for them; 0: they are multiplied as they are"
    )
    expander: int = place("the code that expands them")
    expanded: int = place("the code that multiplies by these")
    expanded_bytes: int = place("bytes of a group of an expanded panel")


class ExpertEntry(Struct):
    """One expert of a layer."""

    gate: LinearEntry = place("makes the gate")
    up: LinearEntry = place("makes what the gate is times")
    down: LinearEntry = place("makes the output")
    num_groups: int = place("groups of channels of gate and up")


class ExpertTable(Struct):
    """A layer's router and experts; an `ExpertEntry` for each follows, the shared one last."""

    num_experts: int = place("that a row chooses from")
    num_chosen: int = place("that a row takes")
    is_normed: int = place("weights are over the sum of the chosen ones'")
    weight_scale: float = place("what weights are times")
    shared: int = place("NO_SHARED, PLAIN_SHARED or GATED_SHARED")
    takes: int = place("which activations the experts take")
    router_norm: int = place("weight of the norm of what the router reads, beside an MLP; 0 elsewhere, as all four")
    input_norm: int = place("weight of the norm of what the experts read")
    mlp_norm: int = place("weight of the norm of what the MLP gives")
    output_norm: int = place("weight of the norm of what the experts give")
    factors: int = place("a float for each expert that its weight is times; 0: none")
    has_sigmoids: int = place("scores are sigmoids instead of a softmax")
    biases: int = place("a float for each expert that is added for the choice alone; 0: none")
    sum_offset: float = place("what is added to the sum of the chosen ones")
    code: int = place("of `experts.run_experts`")
    router: LinearEntry = place("scores of the experts; its last channel is the gate of a shared one")


class LayerInputTable(Struct):
    """The gate of the numbers that tokens have for a layer."""

    gate: LinearEntry = place("makes a gate of hidden states")
    out: LinearEntry = place("reads the gated numbers")
    norm: int = place("weight of the norm of its output")
    factor: int = place("address of a float that scales hidden states instead of the layer's own; 0: none")
    offset: int = place("bytes in a row of all layers' numbers before those of this layer")


class LayerTable(Struct):
    """A layer of a decoder.

    A row has `heads` of queries, `kv_heads` of keys and of values, `more_heads` of a further linear layer, and room for
    `spare_heads`. A layer with a convolution has panels of 16 channels instead of heads: of B, C and u. Those of the
    delta rule are the convolution's input, the scores of beta and of the decay, and the output's gates (`more`).
    """

    query: LinearEntry = place("makes queries")
    key: LinearEntry = place("makes keys")
    value: LinearEntry = place("makes values")
    attention_out: LinearEntry = place("of what the mixer gives")
    gate: LinearEntry = place("makes the gate of the MLP")
    up: LinearEntry = place("makes what the gate is times")
    down: LinearEntry = place("makes the output of the MLP")
    more: LinearEntry = place("makes gates of the mixer's output")
    input_norm: int = place("weight of the norm of what the mixer reads")
    query_norm: int = place("weight of the norm of queries; 0: none, as of all norms")
    key_norm: int = place("weight of the norm of keys")
    attention_out_norm: int = place("weight of the norm of what attention adds")
    mlp_norm: int = place("weight of the norm of what the MLP reads")
    mlp_out_norm: int = place("weight of the norm of what the MLP adds")
    cos: int = place("cosines of angles, a row for each")
    sin: int = place("their sines")
    turned: int = place("channels of a head that turn")
    window: int = place("positions that a row sees; 0: all")
    copy_to: int = place("where hidden states go, too; 0: nowhere")
    sinks: int = place("a score for each query head beside those of the positions, without a value; 0: none")
    heads: int = place("of queries")
    kv_heads: int = place("of keys")
    head_size: int = place("channels of a head")
    padded_head: int = place("and with its padding")
    scale: float = place("what scores are times")
    mlp_width: int = place("channels of the MLP with their padding")
    kv_at: int = place("bytes of a row of the cache that lie before its keys")
    kv_layer: int = place("its number among the layers that keep keys")
    filter: int = place("weights of its convolution, a row for each tap; 0: it has none")
    num_taps: int = place("of the convolution")
    record_at: int = place("bytes of a record that lie before its own")
    experts: ExpertTable = address("its experts; 0 for a plain MLP")
    made_kv_heads: int = place("heads of keys that it makes itself, all or 0")
    value_norm: int = place("weight of the norm of values")
    factor: int = place("a float that its hidden states are times; 0: none")
    layer_input: LayerInputTable = address("of the numbers that tokens have for it; 0: none")
    more_heads: int = place("of the further linear layer")
    spare_heads: int = place("that a row has room for")
    out_heads: int = place("that the mixer gives")
    key_heads: int = place("of the delta rule's keys")
    value_heads: int = place("of its values")
    key_size: int = place("channels of a key of the delta rule; 0 for other layers")
    value_size: int = place("channels of a value")
    is_tiled: int = place("value heads that share a key are apart")
    state_at: int = place("bytes of a state that lie before its own")
    rates: int = place("a float for each head of values")
    step_biases: int = place("what is added to the scores of the decay")
    delta_norm: int = place("weight of the norm of what the delta rule gives")
    states_code: int = place("of `gated_delta.advance_states`; 0 for other layers")
    query_growth: int = place("a float for each position that queries are times; 0: none")
    turns_first: int = place("heads turn before they are normed")
    adds_heads: int = place("heads are added to what lies in `projected`")


class RowTable(Struct):
    """A row of a pass."""

    blocks: int = place("addresses of its sequence's blocks of CACHE_ROWS rows")
    slot: int = place("the row's own one there")
    position: int = place("in its text")
    angle: int = place("the row of its angles in `cos` and `sin`")
    prefix: int = place("how many of the first rows it sees")
    first_ancestor: int = place("the first of its other ancestors, in `ancestors`")
    picked: int = place("rows that layers without a window read, for each layer and KV head; 0: all")
    num_picked: int = place("how many")
    since: int = place("the row from which on they read all")
    scores: int = place("where the scores of the rows go; 0: nowhere")
    num_scores: int = place("how many there are for each query head")
    score_kind: int = place("LOGITS_OF_ROWS, WEIGHTS_OF_ROWS, or QUERIES instead of scores")


class ConvTable(Struct):
    """Records of what convolutions take in: a row's own one; those of its last ancestors follow, oldest first.

    Such a record is an address, -1 - a row of this pass, or 0 before the text.
    """

    recent: int = place("where the row's record is kept for rows of later passes; 0: nowhere")
    landmark: int = place("where it is kept as a landmark; 0: nowhere")


class StepTable(Struct):
    """A step that states of the delta rule take.

    A state is named by a number of a place of the thread, or by an address of all states of a sequence.
    """

    row: int = place("that advances the state")
    record: int = place("that is repeated; 0: the row advances")
    source: int = place("the state before it")
    target: int = place("the state behind it")
    mark: int = place("where a copy goes; 0: nowhere")


class PassTable(Struct):
    """A pass."""

    num_rows: int = place("of the pass")
    num_threads: int = place("that share it out")
    num_layers: int = place("of the decoder")
    first_layer: int = place("that the pass begins with")
    keeps_alone: int = place("the last layer keeps keys and values, and does nothing else")
    width: int = place("of hidden states")
    padded_width: int = place("and with its padding")
    num_outputs: int = place("logits of a row, with their padding")
    layers: int = place("a `LayerTable` for each layer")
    norm: int = place("weight of the last norm")
    eps: float = place("of norms")
    score_cap: float = place("bound of scores; 0: none")
    logit_cap: float = place("bound of logits; 0: none")
    activation: int = place("SILU, GELU or CLAMPED")
    centres: int = place("norms subtract the mean first")
    is_parallel: int = place("the MLP reads what attention reads")
    has_wide_norms: int = place("norms of queries and keys see all heads at once")
    rows: int = place("a `RowTable` for each row")
    ancestors: int = place("of the rows, as numbers of rows of their sequence")
    hidden: int = place("hidden states")
    added: int = place("what a block adds to them, before its norm")
    projected: int = place("queries, keys, values and what is behind them")
    attended: int = place("what the mixer gives")
    gated: int = place("what is behind the gate of MLPs, as bytes")
    gated_scales: int = place("their scales")
    gated_sums: int = place("their sums, and they as floats")
    scratch: int = place("memory of its own for each thread")
    scratch_bytes: int = place("of each thread")
    barrier: int = place("counts threads that wait for each other")
    chosen_rows: int = place("numbers of the rows that have logits")
    num_chosen: int = place("how many")
    logits: int = place("of the chosen rows")
    kv_bytes: int = place("of a number in the cache")
    conv_tables: int = place("a `ConvTable` and its records for each row")
    conv_size: int = place("entries of each")
    routed: int = place("scores of routers")
    experts_at: int = place("bytes of a thread that lie before what experts need")
    experts_read: int = place("different ones that rows have chosen, all layers together")
    steps: int = place("a `StepTable` for each step of states")
    num_steps: int = place("how many")
    input_width: int = place("numbers that tokens have for each layer")
    padded_input_width: int = place("and with their padding; 0: they have none")
    token_inputs: int = place("such numbers of the tokens")
    layer_inputs: int = place("and with what their embeddings add")
    input_norm: int = place("weight of the norm of that")
    expert_sums: int = place("what experts beside an MLP give")
    output: LinearEntry = place("makes logits")
    input_projection: LinearEntry = place("makes such numbers of embeddings")
