//! Elements as the bytes that go over a link. The only unsafe code of the links.

use crate::element::Element;
use crate::work::Span;

/// The bytes of a slice.
pub(crate) fn of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding, so all of the slice's bytes are initialised.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// The bytes of a slice, to be written.
pub(crate) fn of_mut<T: Element>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; and every bit pattern is a valid element.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

/// The bytes of memory that an operation works on.
///
/// # Safety
/// The memory is valid and nothing else accesses it for as long as the slice lives.
pub(crate) unsafe fn of_span<'a>(span: &Span) -> &'a mut [u8] {
    if span.count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise; a span is as long as its slice was.
    unsafe { std::slice::from_raw_parts_mut(span.ptr, span.count * span.dtype.bytes()) }
}
