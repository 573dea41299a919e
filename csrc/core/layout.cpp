#include "core/layout.h"

#include <array>
#include <cstring>
#include <stdexcept>

namespace w4a8 {
namespace {

constexpr std::array<char, 8> kMagic = {'W', '4', 'A', '8', 'P', 'A', 'C', 'K'};

// Little-endian, as every supported CPU is. 64 bytes.
struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t flags;  // bit 0: has a bias
  int64_t n;
  int64_t k;
  int64_t group;
  uint32_t scale_dtype;
  uint32_t kind;                     // WeightKind; zero in version 1
  std::array<uint8_t, 16> reserved;  // zero
};
static_assert(sizeof(Header) == kHeaderBytes);

std::string str(int64_t value) { return std::to_string(value); }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string group_name(const PackedShape& shape) {
  return str(shape.group) + (shape.channelwise() ? " (channelwise)" : "");
}

const char* const kKinds = ", expected 0 (int4), 1 (int4 with zero points), 2 (e2m1) or 3 (int8)";

void check_scale_dtype(uint32_t code, const std::string& where) {
  if (code == 0 || code == 1 || code == 3) return;
  fail(where + "scale dtype is " + str(code) + ", expected 0 (float32), 1 (bfloat16) or 3 (e5m3)");
}

}  // namespace

const char* kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::kInt4: return "int4";
    case WeightKind::kInt4ZeroPoints: return "int4 with zero points";
    case WeightKind::kE2M1: return "e2m1";
    case WeightKind::kInt8: return "int8";
  }
  return "unknown";
}

void check_shape(const PackedShape& shape) {
  if (shape.kind > WeightKind::kInt8) fail("kind is " + str(static_cast<int>(shape.kind)) + kKinds);
  if (shape.n < 1 || shape.n > kMaxN) fail("n (out_features) is " + str(shape.n) + ", expected 1.." + str(kMaxN));
  if (shape.k < 2 || shape.k > max_k(shape.kind) || shape.k % 2 != 0) {
    fail("k (in_features) is " + str(shape.k) + ", expected an even number in 2.." + str(max_k(shape.kind)) +
         (shape.kind == WeightKind::kInt4 ? "" : std::string(" for ") + kind_name(shape.kind)));
  }
  if (!is_group(shape.group, shape.k)) {
    fail("group (block_size) is " + str(shape.group) + ", expected k = " + str(shape.k) +
         " (channelwise), or 16 or a multiple of 32 that divides it");
  }
  if (!is_group(shape.group, shape.multiplied().k)) {
    fail("k (in_features) is " + str(shape.k) + ", expected a multiple of 32 for channelwise int8");
  }
  check_scale_dtype(static_cast<uint32_t>(shape.scale_dtype), "");
  if (shape.two_level() && shape.kind == WeightKind::kInt8) {
    fail("scale dtype is 3 (e5m3, with channel scales), expected 0 (float32) or 1 (bfloat16) for int8");
  }
  if (shape.two_level() && !shape.in_least_groups()) {
    fail("scale dtype is 3 (e5m3, with channel scales), expected 0 (float32) or 1 (bfloat16) for group = " +
         group_name(shape));
  }
}

// n <= 2^31 and a panel of 16 columns has less than 2^25 bytes, so the product fits 64 bits.
int64_t packed_bytes(const PackedShape& shape) { return kHeaderBytes + shape.panels() * shape.panel_bytes(); }

void write_header(const PackedShape& shape, uint8_t* dst) {
  Header header = {};
  header.magic = kMagic;
  header.version = packed_version(shape);
  header.flags = shape.has_bias ? 1 : 0;
  header.n = shape.n;
  header.k = shape.k;
  header.group = shape.group;
  header.scale_dtype = static_cast<uint32_t>(shape.scale_dtype);
  header.kind = static_cast<uint32_t>(shape.kind);
  std::memcpy(dst, &header, sizeof(header));
}

PackedShape read_header(const uint8_t* src, int64_t size, const std::string& what) {
  if (size < kHeaderBytes)
    fail(what + ": size is " + str(size) + " bytes, less than the header of a packed matrix (64)");
  Header header;
  std::memcpy(&header, src, sizeof(header));
  if (header.magic != kMagic) fail(what + ": magic is not 'W4A8PACK': these bytes are not a packed matrix");
  if (header.version < 1 || header.version > 4) {
    fail(what + ": version is " + str(header.version) + ", this library reads versions 1 to 4");
  }
  if ((header.flags & ~1u) != 0) fail(what + ": flags are " + str(header.flags) + ", expected 0 or 1");
  if (header.version == 1 && header.kind != 0) {
    fail(what + ": kind is " + str(header.kind) + ", expected 0 (int4): these bytes are reserved in version 1");
  }
  if (header.version == 2 && header.kind != 1 && header.kind != 2) {
    fail(what + ": kind is " + str(header.kind) + ", expected 1 (int4 with zero points) or 2 (e2m1) in version 2");
  }
  if (header.kind > 3) fail(what + ": kind is " + str(header.kind) + kKinds);
  for (const uint8_t byte : header.reserved) {
    if (byte != 0) fail(what + ": reserved bytes of the header are not zero");
  }
  check_scale_dtype(header.scale_dtype, what + ": ");
  PackedShape shape;
  shape.n = header.n;
  shape.k = header.k;
  shape.group = header.group;
  shape.scale_dtype = static_cast<DType>(header.scale_dtype);
  shape.has_bias = (header.flags & 1u) != 0;
  shape.kind = static_cast<WeightKind>(header.kind);
  try {
    check_shape(shape);
  } catch (const std::invalid_argument& error) {
    fail(what + ": " + error.what());
  }
  if (header.version != packed_version(shape)) {
    fail(what + ": version is " + str(header.version) + ", expected " + str(packed_version(shape)) + " for " +
         kind_name(shape.kind) + ", group = " + group_name(shape));
  }
  if (size != packed_bytes(shape)) {
    fail(what + ": size is " + str(size) + " bytes, its header (n = " + str(shape.n) + ", k = " + str(shape.k) +
         ", group = " + group_name(shape) + ") needs " + str(packed_bytes(shape)));
  }
  return shape;
}

Panels PackedMatrix::panels(int64_t first, const uint8_t* next) const {
  const PackedShape seen = shape.multiplied();
  Panels panels;
  panels.data = panel(first);
  panels.stride = seen.panel_bytes();
  panels.scales_offset = seen.scales_offset();
  panels.zeros_offset = seen.zeros_offset();
  panels.sums_offset = seen.sums_offset();
  panels.bias_offset = seen.bias_offset();
  panels.channel_scales_offset = seen.channel_scales_offset();
  panels.steps = seen.steps();
  panels.group_steps = seen.channelwise() ? seen.steps() : seen.group / kStepK;
  panels.scale_dtype = seen.scale_dtype;
  panels.kind = seen.kind;
  panels.channelwise = seen.channelwise();
  panels.next = next;
  return panels;
}

PackedMatrix open_packed(const uint8_t* src, int64_t size, int64_t n, int64_t k, int64_t group,
                         const std::string& what) {
  const PackedShape shape = read_header(src, size, what);
  if (shape.k != k) fail(what + ": k (in_features) is " + str(shape.k) + ", expected " + str(k));
  if (shape.n != n) fail(what + ": n (out_features) is " + str(shape.n) + ", expected " + str(n));
  if (shape.group != group) {
    fail(what + ": group is " + group_name(shape) + ", expected " + str(group) + (group == k ? " (channelwise)" : ""));
  }
  return {shape, src};
}

}  // namespace w4a8
