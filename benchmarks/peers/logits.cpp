// Writes the logits of all positions of a text, as llama.cpp computes them: `logits MODEL OUT ID ...`, float32.

#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char ** argv) {
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    const int count = argc - 3;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = count + 8;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 2;
    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i] = std::atoi(argv[3 + i]);
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 3;
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = std::fopen(argv[2], "wb");
    if (!out) return 4;
    for (int i = 0; i < count; i++) std::fwrite(llama_get_logits_ith(context, i), sizeof(float), vocab, out);
    return std::fclose(out) ? 5 : 0;
}
