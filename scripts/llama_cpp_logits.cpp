// Writes llama.cpp's logits for given token ids, for scripts/compare_logits.py --peer:
//   llama_cpp_logits MODEL.gguf ids.i32 logits.f32 THREADS
// ids.i32: (T) int32 from --write-ids; logits.f32: (T, V) float32. One sequence in batches of 512 rows, with flash
// attention, as its own server prefills. Not part of the build: docs/benchmarks.md has the command.
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char **argv) {
  constexpr int kBatch = 512;
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s MODEL.gguf ids.i32 logits.f32 THREADS\n", argv[0]);
    return 2;
  }
  std::FILE *in = std::fopen(argv[2], "rb");
  std::FILE *out = std::fopen(argv[3], "wb");
  if (!in || !out) {
    std::perror(in ? argv[3] : argv[2]);
    return 1;
  }
  std::vector<llama_token> ids;
  for (llama_token id; std::fread(&id, sizeof id, 1, in) == 1;) ids.push_back(id);

  llama_backend_init();
  llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = ids.size() + kBatch;
  params.n_batch = params.n_ubatch = kBatch;
  params.n_threads = params.n_threads_batch = std::atoi(argv[4]);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  llama_context *context = llama_init_from_model(model, params);
  if (!context) return 1;

  const size_t V = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const int T = ids.size();
  llama_batch batch = llama_batch_init(kBatch, 0, 1);
  for (int first = 0; first < T; first += kBatch) {
    batch.n_tokens = std::min(kBatch, T - first);
    for (int i = 0; i < batch.n_tokens; ++i) {
      batch.token[i] = ids[first + i];
      batch.pos[i] = first + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) return 1;
    for (int i = 0; i < batch.n_tokens; ++i) {
      if (std::fwrite(llama_get_logits_ith(context, i), sizeof(float), V, out) != V) return 1;
    }
  }
  return std::fclose(out) == 0 ? 0 : 1;
}
