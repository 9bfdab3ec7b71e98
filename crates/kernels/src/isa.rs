//! The instruction set that kernels dispatch on: a set of features, because CPUs have them in many combinations. AMX
//! and BF16 are not steps of one ladder.
//!
//! Detection finds what the CPU and the system offer; a caller can remove features and never add one. Whether a process
//! asked the system for AMX's tile registers is not decided here.

use std::fmt;
use std::sync::LazyLock;

/// Instructions that come together, so that kernels ask for them together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Feature {
    /// AVX2 and FMA.
    Avx2,
    /// Conversions between f16 and f32, eight at a time.
    F16c,
    /// AVX-512 F, VL, BW and DQ.
    Avx512,
    /// Products of bf16 pairs and conversions to bf16 in AVX-512 registers.
    Avx512Bf16,
    /// AMX's tile registers.
    AmxTile,
    /// Products of bf16 tiles.
    AmxBf16,
}

impl Feature {
    /// All of them, each after what it needs.
    pub const ALL: [Feature; 6] = [
        Feature::Avx2,
        Feature::F16c,
        Feature::Avx512,
        Feature::Avx512Bf16,
        Feature::AmxTile,
        Feature::AmxBf16,
    ];

    /// Its name in messages and in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Feature::Avx2 => "avx2",
            Feature::F16c => "f16c",
            Feature::Avx512 => "avx512",
            Feature::Avx512Bf16 => "avx512_bf16",
            Feature::AmxTile => "amx_tile",
            Feature::AmxBf16 => "amx_bf16",
        }
    }

    /// What kernels with this feature may use as well. A CPU without one of these counts as one without the feature.
    const fn needs(self) -> Features {
        match self {
            Feature::Avx2 | Feature::AmxTile => Features::NONE,
            Feature::F16c => Features::NONE.with(Feature::Avx2),
            // The compiler takes F16C for granted in a function that has AVX-512.
            Feature::Avx512 => Features::AVX2,
            Feature::Avx512Bf16 => Features::AVX512,
            Feature::AmxBf16 => Features::NONE.with(Feature::AmxTile),
        }
    }
}

/// Features that a CPU may or may not have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Features(u8);

impl Features {
    const NONE: Features = Features(0);
    const AVX2: Features = Features::NONE.with(Feature::Avx2).with(Feature::F16c);
    const AVX512: Features = Features::AVX2.with(Feature::Avx512);

    const fn with(self, feature: Feature) -> Features {
        Features(self.0 | 1 << feature as u8)
    }
    const fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u8 != 0
    }
    const fn and(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }
    const fn holds(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features whose requirements are all met.
    fn whole(self) -> Features {
        Feature::ALL.into_iter().fold(Features::NONE, |whole, feature| {
            let stays = self.has(feature) && whole.holds(feature.needs());
            if stays { whole.with(feature) } else { whole }
        })
    }
}

/// Sets with a name, from least to most. For each there are kernels that no other set runs.
const SETS: [(&str, Features); 3] =
    [("scalar", Features::NONE), ("avx2", Features::AVX2), ("avx512", Features::AVX512)];

/// The features that kernels may use.
///
/// Every value but [`Isa::SCALAR`] comes from [`Isa::detect`], directly or with features taken away. So holding one proves
/// that this CPU has those instructions: that is what makes the call of a `#[target_feature]` function sound.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Features);

impl Isa {
    /// Plain Rust, on every architecture; the oracle of the others.
    pub const SCALAR: Isa = Isa(Features::NONE);

    /// All features that this CPU has and the system lets it use.
    pub fn detect() -> Isa {
        // Asked once, because CPUID is slow in a virtual machine.
        static FOUND: LazyLock<Isa> = LazyLock::new(|| Isa(find()));
        *FOUND
    }

    /// The named sets that this CPU has, the oracle first: kernels are tested with each.
    pub fn available() -> impl Iterator<Item = Isa> {
        SETS.into_iter().filter(|(_, set)| Isa::detect().0.holds(*set)).map(|(_, set)| Isa(set))
    }

    /// The named sets that this CPU does not have, so that tests can say what they did not run.
    pub fn unavailable() -> impl Iterator<Item = &'static str> {
        SETS.into_iter().filter(|(_, set)| !Isa::detect().0.holds(*set)).map(|(name, _)| name)
    }

    /// The same without `feature` and what needs it.
    pub fn without(self, feature: Feature) -> Isa {
        Isa(Features(self.0.0 & !Features::NONE.with(feature).0).whole())
    }

    /// Limits it by comma-separated `words`: `avx2` keeps no more than that named set, as on an older machine; `-amx`
    /// removes a feature and what needs it.
    ///
    /// ```
    /// use polyreme_kernels::{Feature, Isa};
    /// let isa = Isa::detect().limited("avx512,-f16c").unwrap();
    /// assert!(!isa.has(Feature::F16c) && !isa.has(Feature::Avx512) && !isa.has(Feature::AmxTile));
    /// assert!(Isa::detect().limited("fast").unwrap_err().to_string().contains("scalar, avx2, avx512"));
    /// ```
    pub fn limited(self, words: &str) -> Result<Isa, UnknownName> {
        words.split(',').map(str::trim).try_fold(self, |isa, word| {
            let known = match word.strip_prefix('-') {
                Some("amx") => Some(isa.without(Feature::AmxTile)),
                Some(name) => Feature::ALL.into_iter().find(|f| f.name() == name).map(|f| isa.without(f)),
                None => SETS.iter().find(|(name, _)| *name == word).map(|(_, set)| Isa(isa.0.and(*set))),
            };
            known.ok_or_else(|| UnknownName(word.to_string()))
        })
    }

    /// Whether a feature may be used, and what it needs.
    #[inline]
    pub const fn has(self, feature: Feature) -> bool {
        self.0.has(feature)
    }

    /// Whether AVX2 and FMA may be used.
    #[inline]
    pub const fn has_avx2(self) -> bool {
        self.has(Feature::Avx2)
    }

    /// Whether F16C may be used, besides all of [`Isa::has_avx2`].
    #[inline]
    pub const fn has_f16c(self) -> bool {
        self.has(Feature::F16c)
    }

    /// Whether AVX-512 (F, VL, BW and DQ) may be used, besides all of [`Isa::has_avx2`] and [`Isa::has_f16c`].
    ///
    /// A kernel for it gives the bits of its AVX2 twin: sums are computed in the same order, only more of them at a
    /// time. So machines with and without AVX-512 can share a reproducible run.
    #[inline]
    pub const fn has_avx512(self) -> bool {
        self.has(Feature::Avx512)
    }

    /// The name for people: what most kernels run with.
    pub fn name(self) -> &'static str {
        match (self.has_avx512(), self.has_f16c(), self.has_avx2()) {
            (true, ..) => "avx512",
            (_, true, _) => "avx2+fma+f16c",
            (.., true) => "avx2+fma",
            _ => "scalar",
        }
    }

    /// Its features.
    pub fn features(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |&f| self.has(f))
    }
}

impl Default for Isa {
    /// The best of this CPU.
    fn default() -> Isa {
        Isa::detect()
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_set().entries(self.features().map(Feature::name)).finish()
    }
}

/// A word of [`Isa::limited`] that is neither a set nor a feature to remove.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownName(String);

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let sets: Vec<_> = SETS.iter().map(|(name, _)| *name).collect();
        let less: Vec<_> = Feature::ALL.iter().map(|f| format!("-{}", f.name())).collect();
        write!(
            f,
            "`{}` is unknown; write {} to use no more than that, or turn features off with {}, -amx",
            self.0,
            sets.join(", "),
            less.join(", ")
        )
    }
}

impl std::error::Error for UnknownName {}

#[cfg(not(target_arch = "x86_64"))]
fn find() -> Features {
    Features::NONE
}

/// Detects features from CPUID's registers and XCR0.
#[cfg(target_arch = "x86_64")]
fn find() -> Features {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    /// # Safety
    /// The system has enabled XGETBV: bit 27 of leaf 1's ECX.
    #[target_feature(enable = "xsave")]
    unsafe fn xcr0() -> u64 {
        // SAFETY: register 0 exists wherever the instruction does.
        unsafe { _xgetbv(0) }
    }

    if __cpuid(0).eax < 7 {
        return Features::NONE;
    }
    let (one, seven) = (__cpuid(1), __cpuid_count(7, 0));
    let said = CpuidWords {
        ecx_1: one.ecx,
        ebx_7: seven.ebx,
        edx_7: seven.edx,
        eax_7_1: if seven.eax >= 1 { __cpuid_count(7, 1).eax } else { 0 },
        // SAFETY: the bit says that the system has enabled it.
        xcr0: if one.ecx & 1 << 27 != 0 { unsafe { xcr0() } } else { 0 },
    };
    said.features()
}

/// The CPUID registers with feature bits, by leaf, and XCR0, which says what the system saves.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct CpuidWords {
    ecx_1: u32,
    ebx_7: u32,
    edx_7: u32,
    eax_7_1: u32,
    xcr0: u64,
}

#[cfg(target_arch = "x86_64")]
impl CpuidWords {
    /// Bit numbers are those of Intel's manual, volume 2A, CPUID, and volume 1, chapter 13.
    fn features(self) -> Features {
        let all = |register: u32, bits: &[u32]| bits.iter().all(|bit| register & 1 << bit != 0);
        let saves = |bits: &[u32]| bits.iter().all(|bit| self.xcr0 & 1 << bit != 0);
        // SSE and the upper halves of ymm; the masks, the upper halves of zmm, zmm16 to zmm31; tile configuration and data.
        let ymm = saves(&[1, 2]);
        let zmm = ymm && saves(&[5, 6, 7]);
        let tiles = saves(&[17, 18]);
        let has = |feature: Feature| match feature {
            // FMA and AVX, then AVX2.
            Feature::Avx2 => ymm && all(self.ecx_1, &[12, 28]) && all(self.ebx_7, &[5]),
            Feature::F16c => ymm && all(self.ecx_1, &[29]),
            // F, DQ, BW and VL.
            Feature::Avx512 => zmm && all(self.ebx_7, &[16, 17, 30, 31]),
            Feature::Avx512Bf16 => zmm && all(self.eax_7_1, &[5]),
            Feature::AmxTile => tiles && all(self.edx_7, &[24]),
            Feature::AmxBf16 => tiles && all(self.edx_7, &[22]),
        };
        let found = Feature::ALL.into_iter().filter(|&f| has(f));
        found.fold(Features::NONE, Features::with).whole()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With everything, as on no machine that the tests can count on.
    const ALL: Isa = Isa(Features(0b11_1111));

    fn names(isa: Isa) -> String {
        isa.features().map(Feature::name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn words_take_features_away() {
        let check = |words: &str, want: &str| assert_eq!(names(ALL.limited(words).unwrap()), want, "{words}");
        check("scalar", "");
        check("avx2", "avx2 f16c");
        check("avx512", "avx2 f16c avx512");
        check("-amx", "avx2 f16c avx512 avx512_bf16");
        check("-amx_bf16", "avx2 f16c avx512 avx512_bf16 amx_tile");
        check("-amx, -avx512_bf16", "avx2 f16c avx512");
        check("-avx512", "avx2 f16c amx_tile amx_bf16");
        check("-f16c", "avx2 amx_tile amx_bf16");
        check("avx512,-f16c", "avx2");
        check("-avx2", "amx_tile amx_bf16");
        check("avx2,scalar", "");
        for (words, wrong) in [
            ("fast", "fast"),
            ("", ""),
            ("avx2,", ""),
            ("amx", "amx"),
            ("-scalar", "-scalar"),
            ("avx2 -amx", "avx2 -amx"),
        ] {
            let said = ALL.limited(words).unwrap_err().to_string();
            assert!(said.starts_with(&format!("`{wrong}` is unknown")), "{words}: {said}");
            let known = SETS.iter().map(|(name, _)| *name).chain(Feature::ALL.map(Feature::name));
            known.for_each(|name| assert!(said.contains(name), "{said}"));
        }
    }

    #[test]
    fn what_a_cpu_lacks_cannot_be_added() {
        for set in ["scalar", "avx2", "avx512"] {
            assert_eq!(Isa::SCALAR.limited(set), Ok(Isa::SCALAR));
        }
        for isa in Isa::available() {
            assert!(Isa::detect().0.holds(isa.0) && isa.0 == isa.0.whole(), "{isa:?}");
        }
    }

    #[test]
    fn sets_have_names() {
        let named = |words: &str| ALL.limited(words).unwrap().name();
        assert_eq!([named("-amx"), named("avx512"), named("avx2")], ["avx512", "avx512", "avx2+fma+f16c"]);
        assert_eq!([named("-f16c"), named("-avx2"), named("scalar")], ["avx2+fma", "scalar", "scalar"]);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn features_need_the_cpu_and_the_system() {
        let everything = CpuidWords {
            ecx_1: u32::MAX,
            ebx_7: u32::MAX,
            edx_7: u32::MAX,
            eax_7_1: u32::MAX,
            xcr0: u64::MAX,
        };
        let check = |said: CpuidWords, want: &str| assert_eq!(names(Isa(said.features())), want);
        check(everything, &names(ALL));
        // The system saves: nothing; SSE; AVX too; AVX-512 without its upper registers, then with; and tiles.
        check(CpuidWords { xcr0: 0, ..everything }, "");
        check(CpuidWords { xcr0: 0b11, ..everything }, "");
        check(CpuidWords { xcr0: 0b111, ..everything }, "avx2 f16c");
        check(CpuidWords { xcr0: 0b0110_0111, ..everything }, "avx2 f16c");
        check(CpuidWords { xcr0: 0b1110_0111, ..everything }, "avx2 f16c avx512 avx512_bf16");
        check(CpuidWords { xcr0: 0x2_00e7, ..everything }, "avx2 f16c avx512 avx512_bf16");
        check(CpuidWords { xcr0: 0x6_00e7, ..everything }, &names(ALL));
        // The CPU lacks: FMA; F16C; VL; BF16 of either kind; tiles.
        check(CpuidWords { ecx_1: !(1 << 12), ..everything }, "amx_tile amx_bf16");
        check(CpuidWords { ecx_1: !(1 << 29), ..everything }, "avx2 amx_tile amx_bf16");
        check(CpuidWords { ebx_7: !(1 << 31), ..everything }, "avx2 f16c amx_tile amx_bf16");
        check(CpuidWords { eax_7_1: !(1 << 5), ..everything }, "avx2 f16c avx512 amx_tile amx_bf16");
        check(CpuidWords { edx_7: !(1 << 22), ..everything }, "avx2 f16c avx512 avx512_bf16 amx_tile");
        check(CpuidWords { edx_7: !(1 << 24), ..everything }, "avx2 f16c avx512 avx512_bf16");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_standard_library_finds_the_same_here() {
        let std = |feature: Feature| match feature {
            Feature::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Feature::F16c => is_x86_feature_detected!("f16c"),
            Feature::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
            }
            Feature::Avx512Bf16 => is_x86_feature_detected!("avx512bf16"),
            // Not stable there.
            Feature::AmxTile | Feature::AmxBf16 => Isa::detect().has(feature),
        };
        for feature in Feature::ALL {
            assert_eq!(Isa::detect().has(feature), std(feature), "{feature:?}");
        }
    }

    #[test]
    fn tests_say_which_kernels_they_could_not_run() {
        use std::io::Write as _;
        assert_eq!(Isa::available().count() + Isa::unavailable().count(), SETS.len());
        // By features: those of products of bf16 are in no named set.
        let (has, missing): (Vec<_>, Vec<_>) = Feature::ALL.iter().partition(|f| Isa::detect().has(**f));
        assert_eq!(has, Isa::detect().features().collect::<Vec<_>>());
        if !missing.is_empty() {
            let names: Vec<_> = missing.into_iter().map(Feature::name).collect();
            // Past the capture of tests that pass.
            writeln!(std::io::stderr(), "not tested: kernels for {}, which this CPU lacks", names.join(", "))
                .unwrap();
        }
    }
}
