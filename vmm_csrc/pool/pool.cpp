#include "pool/pool.h"

#include <string>

namespace kvelastic {

Result<std::unique_ptr<Pool>> Pool::create(const Geometry& geometry,
                                           std::shared_ptr<Backing> backing,
                                           const PoolOptions& options,
                                           std::shared_ptr<DeviceSet> device_set) {
  if (options.min_reserved_pages > options.max_reserved_pages) {
    return Error{Errc::kInvalidArgument, "min_reserved_pages is " +
                                             std::to_string(options.min_reserved_pages) +
                                             ", more than max_reserved_pages, " +
                                             std::to_string(options.max_reserved_pages)};
  }
  if (device_set && device_set->copy_bytes() != geometry.page_bytes()) {
    return Error{Errc::kInvalidArgument,
                 "the device set is for pages of " + std::to_string(device_set->copy_bytes()) +
                     " bytes, and those of the pool have " + std::to_string(geometry.page_bytes())};
  }
  if (options.max_blocks < 2) {
    return Error{Errc::kInvalidArgument, "max_blocks is " + std::to_string(options.max_blocks) +
                                             ", must be at least 2: the null block and one more"};
  }
  if (Status sound = geometry.check(1); !sound) return sound.error();
  Result<std::unique_ptr<Blocks>> blocks = Blocks::create(geometry);
  if (!blocks) return blocks.error();
  return std::unique_ptr<Pool>(
      new Pool(std::move(backing), options, *std::move(blocks), std::move(device_set)));
}

Result<std::uint64_t> Pool::close(bool discard) {
  const std::lock_guard session(state.session);
  Result<std::uint64_t> held = std::uint64_t{0};
  {
    PoolState::Change change(state);
    Accounting& accounting = change->accounting;
    accounting.limit.set_asleep(true);  // the limit now allows no page
    accounting.fail({Errc::kPoolFailed, "the pool is closed; make another one"});
    state.settled.wait(change.for_wait(), [&] { return accounting.moving_pages() == 0; });
    if (discard) {
      accounting.drop_pins();
      accounting.discard_all();
    }
    const Status done = reclaimer_.enforce(change);
    held = done ? Result<std::uint64_t>(accounting.held_pages()) : done.error();
  }
  publish_to(nullptr);  // after the segment shows what is left
  return held;
}

void Pool::publish_to(std::shared_ptr<ControlBlockOwner> control_block) {
  const PoolState::Change change(state);
  change->counters.publish_to(std::move(control_block));
}

Status Pool::check_integrity() const {
  const PoolState::Look look(state);
  const Accounting& accounting = look->accounting;
  if (Status sound = accounting.check_integrity(); !sound) return sound;
  if (!state.device_set || accounting.failure()) return ok();
  return state.device_set->check_integrity(accounting.held_pages());
}

}  // namespace kvelastic
