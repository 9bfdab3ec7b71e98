//! Numbers and texts as bytes, with a bound on everything that is read.

/// The bytes do not follow the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Malformed;

/// Longest text of a message; longer ones are cut when they are written.
pub(crate) const TEXT_BYTES_MAX: usize = 4096;

/// Appends to a message.
pub(crate) trait Put {
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
    /// A text, cut at [`TEXT_BYTES_MAX`].
    fn put_text(&mut self, text: &str);
    /// Bytes with their length.
    fn put_bytes(&mut self, bytes: &[u8]);
}

impl Put for Vec<u8> {
    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_text(&mut self, text: &str) {
        self.put_bytes(cut(text, TEXT_BYTES_MAX).as_bytes());
    }

    fn put_bytes(&mut self, bytes: &[u8]) {
        self.put_u32(u32::try_from(bytes.len()).expect("messages are far shorter than 4 GiB"));
        self.extend_from_slice(bytes);
    }
}

/// Reads a message from its start to its end.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes were taken")))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes were taken")))
    }

    /// Length-prefixed bytes; nothing is reserved before they have arrived.
    pub(crate) fn bytes(&mut self, bytes_max: usize) -> Result<&'a [u8], Malformed> {
        let n = self.u32()? as usize;
        if n > bytes_max {
            return Err(Malformed);
        }
        self.take(n)
    }

    pub(crate) fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.bytes(TEXT_BYTES_MAX)?;
        Ok(std::str::from_utf8(bytes).map_err(|_| Malformed)?.to_owned())
    }

    /// How many elements follow, each of at least `element_bytes_min` bytes.
    pub(crate) fn count(&mut self, element_bytes_min: usize) -> Result<usize, Malformed> {
        let n = self.u32()? as usize;
        if n > self.0.len() / element_bytes_min.max(1) {
            return Err(Malformed);
        }
        Ok(n)
    }

    /// Nothing may be left over.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

/// The longest prefix that fits, cut between characters.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    if text.len() <= bytes_max {
        return text;
    }
    let mut end = bytes_max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
