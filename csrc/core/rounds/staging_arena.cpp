#include "rounds/staging_arena.h"

#include <algorithm>

#include "rounds/rank_rounds.h"

namespace meshcast {

StagingArena::Buffer StagingArena::take(int64_t nbytes, int32_t first, int32_t last) {
  const auto over = [first](const Block& block) { return block.last < first; };
  std::copy_if(live_.begin(), live_.end(), std::back_inserter(past_), over);
  live_.erase(std::remove_if(live_.begin(), live_.end(), over), live_.end());

  const int64_t size =
      std::max<int64_t>((nbytes + kStagingAlignment - 1) / kStagingAlignment, 1) * kStagingAlignment;
  Buffer buffer;
  auto place = live_.begin();
  for (; place != live_.end() && place->offset - buffer.offset < size; ++place)
    buffer.offset = place->offset + place->nbytes;
  live_.insert(place, {buffer.offset, size, last, {}});
  size_ = std::max(size_, buffer.offset + size);

  const int64_t end = buffer.offset + size;
  std::vector<Block> rest;
  for (const Block& past : past_) {
    const int64_t past_end = past.offset + past.nbytes;
    if (past_end <= buffer.offset || past.offset >= end) {
      rest.push_back(past);
      continue;
    }
    buffer.before.exchange = std::max(buffer.before.exchange, past.use.exchange);
    buffer.before.mark = std::max(buffer.before.mark, past.use.mark);
    if (past.offset < buffer.offset)
      rest.push_back({past.offset, buffer.offset - past.offset, past.last, past.use});
    if (past_end > end) rest.push_back({end, past_end - end, past.last, past.use});
  }
  past_ = std::move(rest);
  return buffer;
}

void StagingArena::used(int64_t offset, LastUse use) {
  const auto block =
      std::find_if(live_.begin(), live_.end(), [offset](const Block& b) { return b.offset == offset; });
  block->use.exchange = std::max(block->use.exchange, use.exchange);
  block->use.mark = std::max(block->use.mark, use.mark);
}

}  // namespace meshcast
