#include "core/layout.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

namespace w4a8 {
namespace {

constexpr std::array<char, 8> kMagic = {'W', '4', 'A', '8', 'P', 'A', 'C', 'K'};

constexpr uint8_t kHasBias = 1;
constexpr uint8_t kHasZeroPoints = 2;
constexpr uint8_t kHasChannelScales = 4;
constexpr uint8_t kHasMinimums = 8;
constexpr uint8_t kAllFlags = 15;

// Little-endian. Every field is independent of the others; check_shape says which of them go together.
struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint8_t values;      // Values
  uint8_t scale_type;  // ScaleType
  uint8_t flags;       // kHasBias | kHasZeroPoints | kHasChannelScales | kHasMinimums
  uint8_t zero;
  int64_t n;
  int64_t k;
  int64_t group;
  int64_t activation_group;          // or kWholeRow
  std::array<uint8_t, 16> reserved;  // zeros
};
static_assert(sizeof(Header) == kHeaderBytes);

constexpr int64_t whole_lines(int64_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

std::string str(int64_t value) { return std::to_string(value); }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string group_name(const PackedShape& shape) {
  return str(shape.group) + (shape.channelwise() ? " (channelwise)" : "");
}

void check_codes(unsigned values, unsigned scale_type, const std::string& where) {
  if (values > 4) {
    fail(where + "values are " + str(values) + ", expected 0 (int4), 1 (e2m1), 2 (int8), 3 (iq4) or 4 (int6)");
  }
  if (scale_type > 5) {
    fail(where + "scale type is " + str(scale_type) +
         ", expected 0 (float32), 1 (bfloat16), 2 (float16), 3 (e5m3), 4 (e8m0) or 5 (super)");
  }
}

// Checks kind and groups of matrices with scales of one byte.
void check_scale_type(const PackedShape& shape) {
  const std::string name = std::string("scale type is ") + scale_type_name(shape.scale_type);
  if (shape.scale_type == ScaleType::kE5M3) {
    if (are_wide(shape.kind.values) || shape.kind.values == Values::kInt6) {
      fail(name + " (beside channel scales), expected a float type for " + kind_name(shape.kind));
    }
    if (!shape.in_least_groups()) {
      fail(name + " (beside channel scales), expected a float type for group = " + group_name(shape) +
           ": groups of 16 alone have such scales");
    }
  }
  if (shape.scale_type == ScaleType::kE8M0) {
    if (shape.kind != kE2M1) fail(name + ", expected a float type for " + kind_name(shape.kind));
    if (shape.channelwise() || shape.in_least_groups()) {
      fail(name + ", expected a float type for group = " + group_name(shape) +
           ": groups that are multiples of 32 alone have such scales");
    }
  }
  if (shape.in_supers()) {
    if (shape.kind.values == Values::kE2M1 || shape.kind.zero_points) {
      fail(name + ", expected a float type for " + kind_name(shape.kind));
    }
    if (shape.k % kSuperK != 0 || kSuperK % shape.group != 0 || shape.group == kSuperK) {
      fail(name + ", expected a float type for k = " + str(shape.k) + " and group = " + group_name(shape) +
           ": it needs k that is a multiple of 256 and groups of 16, 32, 64 or 128");
    }
  }
}

void check_minimums(const PackedShape& shape) {
  if (!shape.kind.minimums) return;
  if (!are_integers(shape.kind.values) || shape.kind.zero_points) {
    fail(std::string("minimums beside ") + kind_name({shape.kind.values, shape.kind.zero_points}) +
         ", expected them beside int4, int8 or int6 without zero points");
  }
  if (shape.channelwise() || shape.group > kMostMinimumGroup) {
    fail("minimums in groups of " + group_name(shape) + ", expected groups of at most " + str(kMostMinimumGroup));
  }
  if (scale_bytes(shape.scale_type) == 1 && !shape.in_supers()) {
    fail(std::string("minimums beside scales of ") + scale_type_name(shape.scale_type) +
         ", expected scales that are floats, or super");
  }
}

}  // namespace

const char* kind_name(WeightKind kind) {
  switch (kind.values) {
    case Values::kInt4:
      return kind.zero_points ? "int4 with zero points" : (kind.minimums ? "int4 with minimums" : "int4");
    case Values::kE2M1: return "e2m1";
    case Values::kIQ4: return "iq4";
    case Values::kInt6:
      return kind.zero_points ? "int6 with zero points" : (kind.minimums ? "int6 with minimums" : "int6");
    case Values::kInt8:
      return kind.zero_points ? "int8 with zero points" : (kind.minimums ? "int8 with minimums" : "int8");
  }
  return "unknown";
}

const char* values_name(Values values) {
  switch (values) {
    case Values::kInt4: return "int4";
    case Values::kE2M1: return "e2m1";
    case Values::kIQ4: return "iq4";
    case Values::kInt6: return "int6";
    case Values::kInt8: return "int8";
  }
  return "unknown";
}

const char* scale_type_name(ScaleType type) {
  switch (type) {
    case ScaleType::kFloat32: return "float32";
    case ScaleType::kBFloat16: return "bfloat16";
    case ScaleType::kFloat16: return "float16";
    case ScaleType::kE5M3: return "e5m3";
    case ScaleType::kE8M0: return "e8m0";
    case ScaleType::kSuper: return "super";
  }
  return "unknown";
}

void check_shape(const PackedShape& shape) {
  check_codes(static_cast<unsigned>(shape.kind.values), static_cast<unsigned>(shape.scale_type), "");
  if (!may_have_zeros(shape.kind.values) && shape.kind.zero_points) {
    const std::string name = kind_name({shape.kind.values});
    fail("values are " + name + " with zero points, expected " + name + " without");
  }
  if (shape.n < 1 || shape.n > kMaxN) fail("n (out_features) is " + str(shape.n) + ", expected 1.." + str(kMaxN));
  if (shape.k < 2 || shape.k > max_k(shape.kind) || shape.k % 2 != 0) {
    fail("k (in_features) is " + str(shape.k) + ", expected an even number in 2.." + str(max_k(shape.kind)) +
         (shape.kind == kInt4 ? "" : std::string(" for ") + kind_name(shape.kind)));
  }
  if (!is_group(shape.group, shape.k)) {
    fail("group (block_size) is " + str(shape.group) + ", expected k = " + str(shape.k) +
         " (channelwise), or 16 or a multiple of 32 that divides it");
  }
  if (shape.group > max_summed(shape.kind)) {
    fail("group (block_size) is " + group_name(shape) + ", expected at most " + str(max_summed(shape.kind)) + " for " +
         kind_name(shape.kind) + ": their products would not sum up in int32");
  }
  check_scale_type(shape);
  check_minimums(shape);
  if (!is_activation_group(shape.activation_group, shape.group, shape.k)) {
    const int64_t size = shape.activation_group;
    const std::string unit = shape.in_least_groups() ? "k = " + str(shape.k) : "group = " + group_name(shape);
    fail("activation_group is " + str(size) + ", expected -1 (whole rows), or 32, 64 or 128" +
         (is_activation_group(size, size, size) ? " that divides " + unit : ""));
  }
}

PanelLayout panel_layout(const PackedShape& shape) {
  PanelLayout layout = {};
  layout.kind = shape.kind;
  layout.scale_type = shape.scale_type;
  layout.channelwise = shape.channelwise();
  layout.steps = (shape.k + kStepK - 1) / kStepK;
  layout.step_bytes = shape.kind.values == Values::kInt8 ? kByteStepBytes : kStepBytes;
  if (shape.kind.values == Values::kInt6) {
    layout.steps = (layout.steps + kSixSteps - 1) / kSixSteps * kSixSteps;
    layout.step_bytes = kSixBlockBytes / kSixSteps;
  }
  layout.groups = shape.groups();
  layout.group_steps = shape.channelwise() ? layout.steps : shape.group / kStepK;
  layout.scaled = shape.activation_group != kWholeRow;
  layout.part_steps = layout.scaled ? shape.rows().part / kStepK : layout.group_steps;
  layout.scale_line = kPanelColumns * scale_bytes(shape.scale_type);
  if (shape.kind.minimums) layout.records_offset = whole_lines(layout.minimums_at(layout.groups));
  const int64_t of_group = layout.scale_line + (shape.kind.zero_points ? kPanelColumns : 0);
  int64_t whole = shape.in_supers() ? layout.super_groups() : 1;
  while (!shape.in_supers() && whole * of_group % kLineBytes != 0) whole *= 2;
  layout.record_groups = std::min(whole, layout.groups);
  layout.zeros_offset = layout.record_groups * layout.scale_line;
  layout.head_bytes = whole_lines(layout.record_groups * of_group + (shape.in_supers() ? kSuperLine : 0));
  layout.record_bytes = layout.head_bytes + layout.record_groups * layout.group_steps * layout.step_bytes;
  const int64_t records = (layout.groups + layout.record_groups - 1) / layout.record_groups;
  layout.sums_offset = layout.records_offset + records * layout.head_bytes + layout.steps * layout.step_bytes;
  layout.bias_offset = layout.sums_offset + kLineBytes;
  layout.channel_offset = layout.bias_offset + kLineBytes;
  layout.panel_bytes = layout.channel_offset + (shape.two_level() ? kLineBytes : 0);
  return layout;
}

// n <= 2^31 and a panel of 16 columns has less than 2^25 bytes, so the product fits 64 bits.
int64_t packed_bytes(const PackedShape& shape) {
  return kHeaderBytes + shape.panels() * panel_layout(shape).panel_bytes;
}

void write_header(const PackedShape& shape, uint8_t* dst) {
  Header header = {};
  header.magic = kMagic;
  header.version = kPackedVersion;
  header.values = static_cast<uint8_t>(shape.kind.values);
  header.scale_type = static_cast<uint8_t>(shape.scale_type);
  header.flags =
      static_cast<uint8_t>((shape.has_bias ? kHasBias : 0) | (shape.kind.zero_points ? kHasZeroPoints : 0) |
                           (shape.two_level() ? kHasChannelScales : 0) | (shape.kind.minimums ? kHasMinimums : 0));
  header.n = shape.n;
  header.k = shape.k;
  header.group = shape.group;
  header.activation_group = shape.activation_group;
  std::memcpy(dst, &header, sizeof(header));
}

PackedShape read_header(const uint8_t* src, int64_t size, const std::string& what) {
  if (size < kHeaderBytes)
    fail(what + ": size is " + str(size) + " bytes, less than the header of a packed matrix (64)");
  Header header;
  std::memcpy(&header, src, sizeof(header));
  if (header.magic != kMagic) fail(what + ": magic is not 'W4A8PACK': these bytes are not a packed matrix");
  if (header.version >= 1 && header.version < kPackedVersion) {
    fail(what + ": version is " + str(header.version) + ": packed before w4a8 0.1, pack the weights again");
  }
  if (header.version != kPackedVersion) {
    fail(what + ": version is " + str(header.version) + ", this library reads version " + str(kPackedVersion));
  }
  check_codes(header.values, header.scale_type, what + ": ");
  if (header.flags > kAllFlags) {
    fail(what + ": flags are " + str(header.flags) +
         ", expected a sum of 1 (bias), 2 (zero points), 4 (channel scales) and 8 (minimums)");
  }
  if (header.zero != 0 || header.reserved != Header{}.reserved) {
    fail(what + ": reserved bytes of the header are not zero");
  }
  PackedShape shape;
  shape.n = header.n;
  shape.k = header.k;
  shape.group = header.group;
  shape.scale_type = static_cast<ScaleType>(header.scale_type);
  shape.has_bias = (header.flags & kHasBias) != 0;
  shape.kind = {static_cast<Values>(header.values), (header.flags & kHasZeroPoints) != 0,
                (header.flags & kHasMinimums) != 0};
  shape.activation_group = header.activation_group;
  if (shape.two_level() != ((header.flags & kHasChannelScales) != 0)) {
    fail(what + ": flags are " + str(header.flags) + ", expected 4 (channel scales) " +
         (shape.two_level() ? "among them" : "not among them") + " for scale type " +
         scale_type_name(shape.scale_type));
  }
  try {
    check_shape(shape);
  } catch (const std::invalid_argument& error) {
    fail(what + ": " + error.what());
  }
  if (size != packed_bytes(shape)) {
    fail(what + ": size is " + str(size) + " bytes, its header (n = " + str(shape.n) + ", k = " + str(shape.k) +
         ", group = " + group_name(shape) + ") needs " + str(packed_bytes(shape)));
  }
  return shape;
}

PackedMatrix open_packed(const uint8_t* src, int64_t size, int64_t n, int64_t k, int64_t group,
                         const std::string& what) {
  const PackedShape shape = read_header(src, size, what);
  if (shape.k != k) fail(what + ": k (in_features) is " + str(shape.k) + ", expected " + str(k));
  if (shape.n != n) fail(what + ": n (out_features) is " + str(shape.n) + ", expected " + str(n));
  if (group != kAnyGroup && shape.group != group) {
    fail(what + ": group is " + group_name(shape) + ", expected " + str(group) + (group == k ? " (channelwise)" : ""));
  }
  return {shape, src};
}

}  // namespace w4a8
