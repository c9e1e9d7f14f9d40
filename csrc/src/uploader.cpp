#include "pycollect/uploader.h"

#include <utility>

namespace pycollect::inline PYCOLLECT_ABI::cuda {

bool Upload::done() {
  const bool done = event_.done();
  if (done) {
    let_go();
  }
  return done;
}

void Upload::wait() {
  event_.wait();
  let_go();
}

void Upload::hold_back(Stream stream) { event_.hold_back(stream); }

void Upload::let_go() {
  std::shared_ptr<const void> owner;  // destroyed after the unlock: it may call a pool
  const std::lock_guard lock(mutex_);
  owner.swap(owner_);
}

Uploader::Uploader(int device) : context_(Context::of(device)), stream_(context_) {}

Uploader::~Uploader() {
  try {
    wait();
  } catch (const Error&) {  // the device is lost and no longer reads host memory
  }
}

std::shared_ptr<Upload> Uploader::upload(std::shared_ptr<const void> owner,
                                         std::span<const std::byte> source, DevicePointer target,
                                         Stream consumer, std::optional<Stream> after) {
  release_finished();
  std::shared_ptr<Upload> upload(new Upload(context_, std::move(owner)));
  {
    const std::lock_guard lock(mutex_);
    under_way_.push_back(upload);  // may throw, so it comes before the copy
    try {
      copy(*upload, source, target, after);
    } catch (...) {
      under_way_.pop_back();
      throw;
    }
  }
  upload->hold_back(consumer);
  return upload;
}

void Uploader::copy(Upload& upload, std::span<const std::byte> source, DevicePointer target,
                    std::optional<Stream> after) const {
  if (after) {
    Event before(context_);
    before.record(*after);
    before.hold_back(stream());
  }
  context_->copy_to_device(target, source.data(), static_cast<std::int64_t>(source.size()),
                           stream());
  try {
    upload.event_.record(stream());
  } catch (const Error&) {
    // Without the event, nothing reports the end of the copy, so wait for it before the owner is
    // released.
    try {
      context_->wait(stream());
    } catch (const Error&) {  // the device is lost, see above
    }
    throw;
  }
}

std::int64_t Uploader::release_finished() {
  std::deque<std::shared_ptr<Upload>> finished;
  std::int64_t rest = 0;
  {
    const std::lock_guard lock(mutex_);
    while (!under_way_.empty() && under_way_.front()->event_.done()) {
      finished.push_back(std::move(under_way_.front()));
      under_way_.pop_front();
    }
    rest = static_cast<std::int64_t>(under_way_.size());
  }
  for (const std::shared_ptr<Upload>& upload : finished) {
    upload->let_go();
  }
  return rest;
}

void Uploader::wait() {
  std::deque<std::shared_ptr<Upload>> all;
  {
    const std::lock_guard lock(mutex_);
    all = under_way_;
  }
  for (const std::shared_ptr<Upload>& upload : all) {
    upload->wait();
  }
  release_finished();
}

}  // namespace pycollect::inline PYCOLLECT_ABI::cuda
