//! The header of a JPEG, before the coefficients: sizes, and where its tables are.

use super::super::decode::{JPEG_PIXELS_A_BYTE_MAX, check_size};
use super::super::resize::ImageSize;

/// What the decoder needs to know of a file that it can decode.
#[derive(Debug)]
pub(super) struct Header<'a> {
    pub(super) size: ImageSize,
    /// One component (grey) or three (luma and two of chroma).
    pub(super) components: Vec<Component<'a>>,
    /// The restart interval in units of the scan; 0: none.
    pub(super) restart: usize,
    /// The bytes after the header.
    pub(super) scan: &'a [u8],
}

#[derive(Debug)]
pub(super) struct Component<'a> {
    /// Blocks in a unit of the scan, horizontally and vertically.
    pub(super) across: usize,
    pub(super) down: usize,
    pub(super) quants: &'a [u8; 64],
    pub(super) dc: Codes<'a>,
    pub(super) ac: Codes<'a>,
}

/// A table of Huffman codes: its number, how many codes there are of each length from 1 to 16, and their symbols.
#[derive(Clone, Copy, Debug)]
pub(super) struct Codes<'a> {
    pub(super) number: usize,
    pub(super) counts: &'a [u8; 16],
    pub(super) symbols: &'a [u8],
}

#[derive(Default)]
struct Tables<'a> {
    quants: [Option<&'a [u8; 64]>; 4],
    dc: [Option<Codes<'a>>; 4],
    ac: [Option<Codes<'a>>; 4],
}

/// Reads up to the first scan. `None`: broken, or of a kind left to the other decoder (several scans, more bits, arithmetic
/// codes, four components, colours that are not YCbCr, colours stored at other than whole or half size).
pub(super) fn read(file: &[u8]) -> Option<Header<'_>> {
    let mut rest = file.strip_prefix(b"\xff\xd8")?;
    let mut tables = Tables::default();
    let (mut frame, mut restart, mut jfif) = (None, 0, false);
    loop {
        rest = rest.strip_prefix(b"\xff")?;
        while let Some(filled) = rest.strip_prefix(b"\xff") {
            rest = filled;
        }
        let (&marker, behind) = rest.split_first()?;
        let length = usize::from(u16::from_be_bytes(*behind.first_chunk()?));
        let segment = behind.get(2..length)?;
        rest = &behind[length..];
        match marker {
            // Sequential, Huffman codes.
            0xc0 | 0xc1 => {
                if frame.replace(segment).is_some() {
                    return None;
                }
            }
            0xc4 => tables.read_codes(segment)?,
            0xdb => tables.read_quants(segment)?,
            0xdd => restart = usize::from(u16::from_be_bytes(segment.try_into().ok()?)),
            0xda => {
                let (size, components) = components(frame?, segment, &tables, jfif)?;
                check_size(size, file.len()).ok()?;
                if size.pixels() > file.len().saturating_mul(JPEG_PIXELS_A_BYTE_MAX) {
                    return None;
                }
                return Some(Header { size, components, restart, scan: rest });
            }
            0xe0 => jfif |= segment.starts_with(b"JFIF\0"),
            // Adobe's segment: its twelfth byte says whether colours are YCbCr.
            0xee => {
                if segment.starts_with(b"Adobe") && segment.get(11) != Some(&1) {
                    return None;
                }
            }
            // Other segments of applications, comments.
            0xe1..=0xef | 0xfe => {}
            _ => return None,
        }
    }
}

impl<'a> Tables<'a> {
    fn read_quants(&mut self, mut segment: &'a [u8]) -> Option<()> {
        while let Some((&number, rest)) = segment.split_first() {
            // A number above 3 means 16 bits, or is invalid.
            let (quants, rest) = rest.split_first_chunk()?;
            *self.quants.get_mut(usize::from(number))? = Some(quants);
            segment = rest;
        }
        Some(())
    }

    fn read_codes(&mut self, mut segment: &'a [u8]) -> Option<()> {
        while let Some((&number, rest)) = segment.split_first() {
            let (counts, rest) = rest.split_first_chunk()?;
            let n = counts.iter().map(|&n| usize::from(n)).sum::<usize>();
            let (symbols, rest) = rest.split_at_checked(n)?;
            let (tables, number) = match number >> 4 {
                0 => (&mut self.dc, usize::from(number)),
                1 => (&mut self.ac, usize::from(number & 15)),
                _ => return None,
            };
            *tables.get_mut(number)? = Some(Codes { number, counts, symbols });
            segment = rest;
        }
        Some(())
    }
}

fn components<'a>(
    frame: &[u8],
    scan: &[u8],
    tables: &Tables<'a>,
    jfif: bool,
) -> Option<(ImageSize, Vec<Component<'a>>)> {
    let (&[8, h1, h0, w1, w0, n], frame) = frame.split_first_chunk()? else { return None };
    let size =
        ImageSize { height: u16::from_be_bytes([h1, h0]).into(), width: u16::from_be_bytes([w1, w0]).into() };
    let (&[in_scan], scan) = scan.split_first_chunk()?;
    let n = usize::from(n);
    if !matches!(n, 1 | 3) || usize::from(in_scan) != n || frame.len() != 3 * n || scan.len() != 2 * n + 3 {
        return None;
    }
    // The scan must have all frequencies and all bits.
    if scan[2 * n..] != [0, 63, 0] {
        return None;
    }
    // Without a header that says YCbCr, some writers say RGB in the names of the components.
    if !jfif && n == 3 && [0, 3, 6].map(|i| frame[i]) == *b"RGB" {
        return None;
    }
    let mut components = Vec::with_capacity(n);
    for (frame, scan) in frame.chunks_exact(3).zip(scan.chunks_exact(2)) {
        if frame[0] != scan[0] {
            return None;
        }
        let (across, down) = (usize::from(frame[1] >> 4), usize::from(frame[1] & 15));
        let first = components.is_empty();
        let (across, down) = match (n, across, down) {
            // With a single component a unit is one block, whatever its sampling factors are.
            (1, 1..=4, 1..=4) => (1, 1),
            (3, 1..=2, 1..=2) if first => (across, down),
            (3, 1, 1) => (1, 1),
            _ => return None,
        };
        components.push(Component {
            across,
            down,
            quants: (*tables.quants.get(usize::from(frame[2]))?)?,
            dc: (*tables.dc.get(usize::from(scan[1] >> 4))?)?,
            ac: (*tables.ac.get(usize::from(scan[1] & 15))?)?,
        });
    }
    Some((size, components))
}
