#include <memory>
#include <stdexcept>
#include <string>

#include "engine/pages.h"
#include "include/glint.h"
#include "model/backend.h"

namespace glint {

struct PagePoolTap {
  static void damage(PagePool& pool, const std::string& what, int32_t page) {
    PagePool::Page& target = pool.item(page);
    if (what == "references") {
      target.references = target.references > 0 ? 0 : 1;
    } else if (what == "state") {
      target.state = target.state == PagePool::State::free ? PagePool::State::cached : PagePool::State::free;
    } else if (what == "link") {
      target.previous = page;
    } else if (what == "hash") {
      target.hash ^= 1U;
    } else if (what == "serial") {
      target.serial = pool.next_serial_ - 1;
    } else if (what == "chain") {
      pool.buckets_[pool.bucket_of(target.hash)] = PagePool::kNoPage;
    } else if (what == "held count") {
      --pool.num_held_;
    } else if (what == "free count") {
      ++pool.free_.count;
    } else {
      throw std::invalid_argument("no such damage: " + what);
    }
  }
};

}

namespace {

using glint::PagePool;

constexpr int32_t kMisuse = -1;

thread_local std::string last_error;

template <typename Body>
int32_t guarded(Body body) {
  try {
    return body();
  } catch (const std::logic_error& error) {
    last_error = error.what();
    return kMisuse;
  }
}

std::span<const int32_t> token_span(const int32_t* tokens, int32_t count) {
  return {tokens, static_cast<size_t>(count)};
}

}

extern "C" {

GLINT_API const char* glint_testing_pages_error(void) { return last_error.c_str(); }

GLINT_API PagePool* glint_testing_pages_new(int32_t num_pages, int32_t page_tokens, uint64_t hash_mask) {
  std::unique_ptr<PagePool> pool;
  guarded([&] {
    pool = std::make_unique<PagePool>(num_pages, page_tokens, hash_mask);
    return 0;
  });
  return pool.release();
}

GLINT_API void glint_testing_pages_free(PagePool* pool) { delete pool; }

GLINT_API int32_t glint_testing_pages_take(PagePool* pool, int32_t* out, int32_t count) {
  return guarded([&] { return pool->take({out, static_cast<size_t>(count)}) ? 1 : 0; });
}

GLINT_API int32_t glint_testing_pages_hold(PagePool* pool, int32_t page) {
  return guarded([&] {
    pool->hold(page);
    return 0;
  });
}

GLINT_API int32_t glint_testing_pages_release(PagePool* pool, int32_t page, int32_t is_reusable) {
  return guarded([&] {
    pool->release(page, is_reusable != 0);
    return 0;
  });
}

GLINT_API int32_t glint_testing_pages_references(PagePool* pool, int32_t page) {
  return guarded([&] { return pool->references(page); });
}

GLINT_API void glint_testing_pages_counts(PagePool* pool, int64_t* counts) {
  counts[0] = pool->num_free();
  counts[1] = pool->num_held();
  counts[2] = pool->num_cached();
  counts[3] = pool->available();
}

GLINT_API int32_t glint_testing_pages_root(PagePool* pool, uint64_t salt, uint64_t* root) {
  return guarded([&] {
    *root = pool->root(salt);
    return 0;
  });
}

GLINT_API int32_t glint_testing_pages_find(PagePool* pool, uint64_t parent, const int32_t* tokens, int32_t count,
                                           int32_t* page, uint64_t* serial) {
  return guarded([&] {
    const auto match = pool->find(parent, token_span(tokens, count));
    if (!match) return 0;
    *page = match->page;
    *serial = match->serial;
    return 1;
  });
}

GLINT_API int32_t glint_testing_pages_add(PagePool* pool, uint64_t parent, const int32_t* tokens, int32_t count,
                                          int32_t page, uint64_t* serial) {
  return guarded([&] {
    *serial = pool->add(parent, token_span(tokens, count), page);
    return 0;
  });
}

GLINT_API void glint_testing_round_pages(int32_t is_on) { glint::rounds_new_pages = is_on != 0; }

GLINT_API int32_t glint_testing_pages_check(PagePool* pool) { return pool->check(&last_error) ? 1 : 0; }

GLINT_API int32_t glint_testing_pages_damage(PagePool* pool, const char* what, int32_t page) {
  return guarded([&] {
    glint::PagePoolTap::damage(*pool, what, page);
    return 0;
  });
}
}
