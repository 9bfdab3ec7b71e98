//! From the bytes of a PNG or JPEG file to pixels: `[height, width, channels]` of bytes, three channels (RGB) or one
//! (grey). The format follows from the content, not from the name.
//!
//! As PIL's `convert("RGB")` and `convert("L")`, which torchvision's `ImageFolder` uses: transparency is dropped, not
//! blended; palettes and fewer than 8 bits are expanded, 16 bits are cut to 8; grey is 0.299 R + 0.587 G + 0.114 B. The
//! orientation in EXIF is not applied. Stricter than PIL in one respect: a file that is cut or broken is an error, not a
//! picture with a grey half.

use std::io::Cursor;
use std::path::Path;

use png::{ColorType, Transformations};
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors;
use zune_jpeg::zune_core::bytestream::{ZByteReaderTrait, ZCursor};
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::jpeg::Decoder;
use super::resize::{ImageSize, ResizePart};
use crate::error::DataError;

/// How files of each format start.
const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";
/// The longest side of an image; checked before memory is allocated.
pub(super) const SIDE_MAX: usize = 16_384;
/// Deflate packs at most this many bytes into one.
const DEFLATE_RATIO_MAX: usize = 1032;
/// A block of 8x8 pixels takes at least one bit of a JPEG.
pub(super) const JPEG_PIXELS_A_BYTE_MAX: usize = 512;
/// What is within those bounds may still be half a megabyte that claims 800 MB of memory in each loader thread. So an
/// image of more pixels than this (96 MiB in colour) ..
const LARGE_PIXELS: usize = 32 << 20;
/// .. must have at least one byte per this many pixels. Photographs, however coarse, have far more.
const LARGE_PIXELS_A_BYTE: usize = 64;

/// What is wrong with a file, and where.
#[derive(Debug)]
pub(crate) struct Flaw {
    pub(crate) offset: u64,
    pub(crate) why: String,
}

impl Flaw {
    pub(super) fn new(offset: usize, why: impl Into<String>) -> Flaw {
        Flaw { offset: offset as u64, why: why.into() }
    }

    /// The flaw as an error of a file.
    pub(super) fn of(self, path: &Path) -> DataError {
        DataError::Corrupt { path: path.into(), offset: self.offset, why: self.why }
    }
}

/// Decodes `file` into the front of `pixels`, which grows as needed. `jpeg` is tried first.
pub(super) fn decode(
    file: &[u8],
    grey: bool,
    pixels: &mut Vec<u8>,
    jpeg: &mut Decoder,
) -> Result<ImageSize, Flaw> {
    let Some(mut rows) = jpeg.decode(file, grey, ResizePart::whole) else {
        return decode_any(file, grey, pixels);
    };
    let (size, channels) = (rows.size(), if grey { 1 } else { 3 });
    grow(pixels, size.pixels() * channels);
    rows.write(&mut pixels[..size.pixels() * channels]);
    Ok(size)
}

/// The same without the fast decoder, for any supported file; the error says what is wrong.
pub(super) fn decode_any(file: &[u8], grey: bool, pixels: &mut Vec<u8>) -> Result<ImageSize, Flaw> {
    if file.starts_with(PNG) {
        decode_png(file, grey, pixels)
    } else if file.starts_with(JPEG) {
        decode_jpeg(file, grey, pixels)
    } else {
        Err(Flaw::new(0, "neither PNG nor JPEG; convert it, or remove it from the folder"))
    }
}

/// Whether a file starts as an image that can be decoded does; the rest of it may still be broken.
pub(crate) fn starts_as_image(file: &[u8]) -> bool {
    file.starts_with(PNG) || file.starts_with(JPEG)
}

fn decode_png(file: &[u8], grey: bool, pixels: &mut Vec<u8>) -> Result<ImageSize, Flaw> {
    let mut cursor = Cursor::new(file);
    let result = read_png(&mut cursor, file.len(), grey, pixels);
    // The decoder reads ahead by a chunk's header at most, so this is in the chunk that is broken.
    result.map_err(|why| Flaw::new((cursor.position() as usize).min(file.len()), why))
}

fn read_png(
    cursor: &mut Cursor<&[u8]>,
    len: usize,
    grey: bool,
    pixels: &mut Vec<u8>,
) -> Result<ImageSize, String> {
    let broken = |e: png::DecodingError| format!("broken PNG: {e}");
    let mut decoder = png::Decoder::new(cursor);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    let info = decoder.read_header_info().map_err(broken)?;
    let size = ImageSize { height: info.height as usize, width: info.width as usize };
    check_size(size, len)?;
    let unpacked = info.raw_bytes();
    if unpacked > len.saturating_mul(DEFLATE_RATIO_MAX) {
        return Err(format!("{} x {} pixels cannot be in {len} bytes", size.height, size.width));
    }
    // Two lines of the largest image, with a margin.
    decoder.set_limits(png::Limits { bytes: 64 << 20 });
    let mut reader = decoder.read_info().map_err(broken)?;
    check_palette(reader.info())?;
    let bytes = reader.output_buffer_size().ok_or("too large")?;
    let channels = if grey { 1 } else { 3 };
    grow(pixels, bytes.max(size.pixels() * channels));
    let frame = reader.next_frame(&mut pixels[..bytes]).map_err(broken)?;
    if (frame.width as usize, frame.height as usize) != (size.width, size.height) {
        return Err("broken PNG: the first frame is not the whole image".into());
    }
    reader.finish().map_err(broken)?;
    let stored = match frame.color_type {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err("broken PNG: its palette is missing".into()),
    };
    convert(pixels, size.pixels(), stored, channels);
    Ok(size)
}

/// Checks that a palette has whole colours, and transparency no more entries than it: the decoder relies on both, and panics.
fn check_palette(info: &png::Info<'_>) -> Result<(), String> {
    let (ColorType::Indexed, Some(palette)) = (info.color_type, &info.palette) else { return Ok(()) };
    let (colours, bytes) = (palette.len() / 3, palette.len());
    if bytes % 3 != 0 {
        return Err(format!("broken PNG: a palette of {bytes} bytes, which is not a multiple of 3"));
    }
    match &info.trns {
        Some(alphas) if alphas.len() > colours => {
            let n = alphas.len();
            Err(format!("broken PNG: transparency of {n} colours, but the palette has {colours}"))
        }
        _ => Ok(()),
    }
}

fn decode_jpeg(file: &[u8], grey: bool, pixels: &mut Vec<u8>) -> Result<ImageSize, Flaw> {
    // Checked first, because the decoder does not notice that the last rows are missing.
    if !file.ends_with(b"\xff\xd9") && !ends_after_scan(file) {
        return Err(Flaw::new(file.len(), "broken JPEG: the file ends here, before the image does"));
    }
    read_jpeg(ZCursor::new(file), file.len(), grey, pixels).map_err(|why| {
        // Once more with a reader that says how far it came; only broken files pay for it.
        let mut cursor = Cursor::new(file);
        let _same_error = read_jpeg(&mut cursor, file.len(), grey, pixels);
        Flaw::new((cursor.position() as usize).min(file.len()), why)
    })
}

fn read_jpeg<R: ZByteReaderTrait>(
    reader: R,
    len: usize,
    grey: bool,
    pixels: &mut Vec<u8>,
) -> Result<ImageSize, String> {
    let broken = |e: DecodeErrors| format!("broken JPEG: {}", e.to_string().trim_end());
    let options =
        DecoderOptions::default().set_strict_mode(true).set_max_width(SIDE_MAX).set_max_height(SIDE_MAX);
    let mut decoder = JpegDecoder::new_with_options(reader, options);
    decoder.decode_headers().map_err(broken)?;
    let (width, height) = decoder.dimensions().ok_or("broken JPEG: no size")?;
    let size = ImageSize { height, width };
    check_size(size, len)?;
    if size.pixels() > len.saturating_mul(JPEG_PIXELS_A_BYTE_MAX) {
        return Err(format!("{height} x {width} pixels cannot be in {len} bytes"));
    }
    // Luma is grey already; the decoder then skips the colours.
    let luma = grey && matches!(decoder.input_colorspace(), Some(ColorSpace::YCbCr | ColorSpace::Luma));
    let (space, stored) = if luma { (ColorSpace::Luma, 1) } else { (ColorSpace::RGB, 3) };
    decoder.set_options(options.jpeg_set_out_colorspace(space));
    grow(pixels, size.pixels() * stored);
    decoder.decode_into(&mut pixels[..size.pixels() * stored]).map_err(broken)?;
    convert(pixels, size.pixels(), stored, if grey { 1 } else { 3 });
    Ok(size)
}

/// Whether an end of image comes after the first scan: such a file has other data after the image.
fn ends_after_scan(file: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[0xff, marker, high, low]) = file.get(at..at + 4) {
        if marker == 0xda {
            return file[at..].windows(2).any(|pair| pair == b"\xff\xd9");
        }
        at += 2 + u16::from_be_bytes([high, low]) as usize;
    }
    false
}

/// Whether a file of `len` bytes may hold an image that large; checked before memory is allocated.
pub(super) fn check_size(size: ImageSize, len: usize) -> Result<(), String> {
    let ImageSize { height, width } = size;
    if height == 0 || width == 0 || height > SIDE_MAX || width > SIDE_MAX {
        return Err(format!("{height} x {width} pixels; sides are 1 to {SIDE_MAX}"));
    }
    let limit = len.saturating_mul(LARGE_PIXELS_A_BYTE).max(LARGE_PIXELS);
    if size.pixels() > limit {
        let why = "the file is damaged, or nearly all of one colour: scale the image down, or remove it";
        let millions = |pixels: usize| pixels as f64 / 1e6;
        return Err(format!(
            "claims {height} x {width} pixels ({:.1} million), but at most {:.1} million are read from {len} bytes; {why}",
            millions(size.pixels()),
            millions(limit)
        ));
    }
    Ok(())
}

pub(super) fn grow(pixels: &mut Vec<u8>, len: usize) {
    if pixels.len() < len {
        pixels.resize(len, 0);
    }
}

/// Changes the number of channels in place. Two and four channels are one and three with transparency.
fn convert(pixels: &mut [u8], n: usize, from: usize, to: usize) {
    match (from, to) {
        (1, 3) | (2, 3) => {
            // Backwards, because the result is longer.
            for i in (0..n).rev() {
                let level = pixels[i * from];
                pixels[3 * i..3 * i + 3].fill(level);
            }
        }
        (2, 1) => (0..n).for_each(|i| pixels[i] = pixels[2 * i]),
        (4, 3) => (0..n).for_each(|i| pixels.copy_within(4 * i..4 * i + 3, 3 * i)),
        (3 | 4, 1) => {
            for i in 0..n {
                let [r, g, b] = [0, 1, 2].map(|c| u32::from(pixels[i * from + c]));
                // As PIL: the weights in units of 2^-16, rounded.
                pixels[i] = ((19_595 * r + 38_470 * g + 7_471 * b + 0x8000) >> 16) as u8;
            }
        }
        _ => debug_assert_eq!(from, to),
    }
}
